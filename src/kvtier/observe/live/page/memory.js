// Host memory of a node: by block size, and by tenant with floor and ceiling.

import { made, size } from "./words.js";

const HEIGHT = 18, BAR = 12, MAX_TENANTS = 12, COLOURS = 6;

export class Memory {
  constructor(parent) {
    this.parent = parent;
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  show(node) {
    this.node = node;
    this.draw();
  }

  draw() {
    const width = this.parent.clientWidth;
    if (!width || !this.node) return;
    const tenants = this.node.tenants.slice().sort((one, other) => other.memory_bytes - one.memory_bytes);
    const rows = [byShape(this.node), ...tenants.slice(0, MAX_TENANTS).map(byTenant)];
    this.parent.replaceChildren(...rows.map((row) => this.#figure(row, width)));
  }

  #figure({ name, words, pieces, marks }, width) {
    const keys = words.map(({ text, colour }) => made("span", {}, colour === undefined ? null : made("span", { class: `key s${colour}` }), text));
    return made("figure", { class: "plain" }, made("figcaption", {}, made("b", {}, name), ...keys), this.#bar(pieces, marks, width));
  }

  #bar(pieces, marks, width) {
    const scale = (bytes) => Math.min(1, bytes / this.node.memory_bytes) * width;
    const top = (HEIGHT - BAR) / 2;
    const svg = made("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": true },
      made("rect", { class: "bar", x: 0, y: top, width, height: BAR, rx: 4 }));
    let x = 0;
    for (const { bytes, colour } of pieces) {
      const wide = scale(bytes);
      if (wide) svg.append(made("rect", { class: `piece s${colour}`, x, y: top, width: Math.max(wide - 1, 1), height: BAR, rx: 2 }));
      x += wide;
    }
    for (const bytes of marks) {
      const at = Math.min(Math.max(scale(bytes), 1), width - 1);
      svg.append(made("line", { class: "mark", x1: at, x2: at, y1: 0, y2: HEIGHT }));
    }
    return svg;
  }
}

// A segment is cut into blocks of one size at a time.
function byShape(node) {
  const shapes = new Map();
  for (const room of node.rooms) {
    shapes.set(room.block_bytes, (shapes.get(room.block_bytes) ?? 0) + room.segments * node.segment_bytes);
  }
  const parts = [...shapes].filter(([, bytes]) => bytes).sort(([one], [other]) => one - other);
  return {
    name: "Segments by block size",
    words: [
      ...parts.map(([shape, bytes], at) => ({ text: `${size(bytes)} in blocks of ${size(shape)}`, colour: at % COLOURS })),
      { text: `${size(node.free_bytes)} free` },
    ],
    pieces: parts.map(([, bytes], at) => ({ bytes, colour: at % COLOURS })),
    marks: [],
  };
}

function byTenant({ name, memory_bytes: held, pinned_bytes: pinned, floor_bytes: floor, ceiling_bytes: ceiling }) {
  return {
    name: `Tenant ${name}`,
    words: [
      { text: size(held), colour: 0 },
      ...(pinned ? [{ text: `${size(pinned)} of it pinned`, colour: 3 }] : []),
      { text: `floor ${size(floor)}` },
      { text: `ceiling ${size(ceiling)}` },
    ],
    pieces: [{ bytes: pinned, colour: 3 }, { bytes: held - pinned, colour: 0 }],
    marks: [floor, ceiling],
  };
}
