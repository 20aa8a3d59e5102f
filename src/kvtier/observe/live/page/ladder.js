// The tiers as a ladder: memory tiers above, storage tiers side by side below, with transfer rates.

import { STATES, count, made, rate, seconds, share, size } from "./words.js";

const BOX = 62, GAP = 46, SPACE = 10;
const MEMORIES = ["device", "host"];
const NOTHING = { bytes_per_s: null, is_refused: false, in_flight: null, queued_s: null };

export class Ladder {
  constructor(parent) {
    this.parent = parent;
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  show(picture) {
    this.picture = picture;
    this.draw();
  }

  draw() {
    const width = this.parent.clientWidth;
    if (!width || !this.picture) return;
    const { boxes, height } = this.#places(width);
    const svg = made("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.#words() });
    for (const box of boxes.values()) svg.append(this.#box(box));
    for (const part of this.#ways(boxes)) svg.append(part);
    this.parent.replaceChildren(svg);
  }

  #places(width) {
    const named = new Map(this.picture.tiers.map((tier) => [tier.name, tier]));
    for (const { src, dst } of this.picture.flows) {
      for (const name of [src, dst]) if (!named.has(name)) named.set(name, { name, fill: null, slots: null, capacity_bytes: null, left_alone: null });
    }
    const memories = MEMORIES.filter((name) => named.has(name));
    const storages = [...named.keys()].filter((name) => !MEMORIES.includes(name));
    const boxes = new Map();
    memories.forEach((name, at) => boxes.set(name, { tier: named.get(name), x: 1, y: 1 + at * (BOX + GAP), width: width - 2, level: at }));
    const each = (width - 2 - SPACE * (storages.length - 1)) / storages.length;
    storages.forEach((name, at) => boxes.set(name, {
      tier: named.get(name), x: 1 + at * (each + SPACE), y: 1 + memories.length * (BOX + GAP), width: each, level: memories.length,
    }));
    const levels = memories.length + (storages.length ? 1 : 0);
    return { boxes, height: Math.max(1, levels * (BOX + GAP) - GAP + 2) };
  }

  #box({ tier, x, y, width }) {
    const [state, kind] = tier.left_alone ? STATES[tier.left_alone] : ["", ""];
    const hits = this.picture.hits.find((each) => each.tier === tier.name);
    const inside = width - 24;
    const fits = (text) => (text.length * 6.4 > inside ? text.slice(0, Math.floor(inside / 6.4) - 1) + "…" : text);
    const parts_of = tier.capacity_bytes !== null ? `${size(tier.used_bytes)} of ${size(tier.capacity_bytes)}`
      : tier.slots !== null ? `${count(tier.used)} of ${count(tier.slots)} blocks` : "";
    const used = [parts_of && `${parts_of} in use`, parts_of, tier.fill === null ? "" : `${share(tier.fill)} in use`]
      .find((text) => text && text.length * 6.4 <= inside) ?? "";
    const served = hits && hits.recent !== null ? `${share(hits.recent)} of ${this.picture.node ? "blocks" : "tokens"}` : "";
    const parts = [
      made("rect", { class: `box ${kind}`, x, y, width, height: BOX, rx: 8 }),
      text(x + 12, y + 20, tier.name, "name"),
      text(x + 12, y + 38, fits(state || used), state ? kind : "faint"),
    ];
    if (width > 160 && served) parts.push(text(x + width - 12, y + 20, served, "", "end"));
    if (tier.fill !== null) {
      parts.push(made("rect", { class: "bar", x: x + 12, y: y + 47, width: inside, height: 8, rx: 4 }));
      const filled = Math.min(1, tier.fill) * inside;
      if (filled) parts.push(made("rect", { class: "filled", x: x + 12, y: y + 47, width: Math.max(filled, 4), height: 8, rx: 4 }));
    }
    return made("g", {}, ...parts);
  }

  // Draws, in the gap above each box, an arrow up and an arrow down with their transfer rates.
  *#ways(boxes) {
    for (const box of boxes.values()) {
      const above = [...boxes.values()].filter((each) => each.level === box.level - 1).at(0);
      if (!above) continue;
      const low = box.y - 4, high = above.y + BOX + 4;
      const up = this.#flow(box.tier.name, above.tier.name) ?? NOTHING, down = this.#flow(above.tier.name, box.tier.name) ?? NOTHING;
      const direct = this.picture.flows.find(({ src, dst }) => src === box.tier.name && boxes.get(dst).level < above.level);
      yield* arrow(box.x + 16, low, high, up);
      yield* arrow(box.x + 34, high, low, down);
      const lines = [["↑", up], ["↓", down], ["⇈ direct", direct]].filter(([, flow]) => flow);
      const top = (low + high) / 2 - (lines.length - 1) * 7 + 4;
      for (const [at, [sign, flow]] of lines.entries()) {
        yield text(box.x + 48, top + at * 14, told(sign, flow, box.width), flow.is_refused ? "bad" : flow.bytes_per_s ? "" : "faint");
      }
    }
  }

  #flow(src, dst) {
    return this.picture.flows.find((each) => each.src === src && each.dst === dst);
  }

  #words() {
    const tiers = this.picture.tiers.map((tier) => {
      const state = tier.left_alone ? ", " + STATES[tier.left_alone][0] : "";
      return `${tier.name} ${tier.fill === null ? "" : share(tier.fill) + " in use"}${state}`;
    });
    const flows = this.picture.flows.filter((flow) => flow.bytes_per_s).map((flow) => `${flow.src} to ${flow.dst} ${rate(flow.bytes_per_s)}`);
    return [...tiers, ...(flows.length ? flows : ["no transfers"])].join("; ");
  }
}

function told(sign, flow, width) {
  if (flow.is_refused) return `${sign} paused`;
  const parts = [`${sign} ${flow.bytes_per_s ? rate(flow.bytes_per_s) : "–"}`];
  if (width > 230 && flow.in_flight) parts.push(`${count(flow.in_flight)} in flight`);
  if (width > 230 && flow.queued_s > 0.001) parts.push(`queued ${seconds(flow.queued_s)}`);
  return parts.join(", ");
}

function* arrow(x, from, to, flow) {
  if (!flow) return;
  const kind = flow.is_refused ? "refused" : flow.bytes_per_s ? "flows" : "";
  const way = Math.sign(to - from), end = to - way * 8;
  yield made("path", { class: `way ${kind}`, d: `M${x} ${from}V${end}` });
  yield made("path", { class: `tip ${kind}`, d: `M${x - 5} ${end}h10L${x} ${to}z` });
}

function text(x, y, content, kind, anchor = "start") {
  const element = made("text", { x, y, class: kind, "text-anchor": anchor });
  element.textContent = content;
  return element;
}
