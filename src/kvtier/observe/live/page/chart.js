// A few curves over time, as SVG. Values are shown by the pointer, or by the arrow keys.

import { made } from "./words.js";

const HEIGHT = 110, LEFT = 68, TOP = 8, BOTTOM = 18, RIGHT = 6, COLOURS = 6;
const GAP_S = 30; // between points that no line connects

export class Chart {
  // id: of the chart in a point's values. say: formats a value. round: returns the upper end of the
  // axis for a value. least: least upper end.
  constructor(parent, id, title, say, round, least) {
    Object.assign(this, { id, title, say, round, least, points: [], cursor: null });
    this.svg = made("svg", { tabindex: 0, role: "img", height: HEIGHT });
    this.caption = made("figcaption");
    parent.append(made("figure", {}, this.caption, this.svg));
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#read(null));
    this.svg.addEventListener("blur", () => this.#read(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  // points: {time, charts}, oldest first; charts has a value or null by chart and series. span: in s.
  show(points, span) {
    this.span = span;
    this.points = points.filter(({ time }) => time >= points.at(-1).time - span);
    // The server orders the series, so each has the same colour on all pages.
    const charts = points.map(({ charts }) => charts[this.id] ?? {}).reverse();
    const newest = charts.find((each) => Object.keys(each).length) ?? {};
    this.names = [...new Set([newest, ...charts].flatMap(Object.keys))];
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.points.length) return;
    const end = this.points.at(-1).time;
    const lines = this.names.map((name) => this.points.map(({ charts }) => charts[this.id]?.[name] ?? null));
    const values = lines.flat().filter((each) => each !== null);
    const most = this.round(values.reduce((one, other) => Math.max(one, other), this.least));
    const x = (time) => width - RIGHT - ((end - time) / this.span) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    const write = (x, y, anchor, content) => {
      const text = made("text", { class: "axis", x, y, "text-anchor": anchor });
      text.textContent = content;
      parts.push(text);
    };
    for (const value of [0, most / 2, most]) {
      parts.push(made("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      if (values.length) write(LEFT - 6, y(value) + 4, "end", this.say(value));
    }
    if (!values.length) write((LEFT + width - RIGHT) / 2, y(most / 2) - 6, "middle", "nothing yet");
    write(LEFT, HEIGHT - 4, "start", `${this.span / 60} min ago`);
    write(width - RIGHT, HEIGHT - 4, "end", "now");
    lines.forEach((line, number) => parts.push(made("path", { class: `series ${colour(number)}`, d: this.#path(line, x, y) })));
    const at = this.#at();
    if (this.cursor !== null) {
      const cursor = x(this.points[at].time);
      parts.push(made("line", { class: "cursor", x1: cursor, x2: cursor, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    this.#caption(lines.map((line) => line[at]), end - this.points[at].time);
  }

  #path(line, x, y) {
    let path = "", last = -Infinity;
    line.forEach((value, at) => {
      const { time } = this.points[at];
      if (value !== null) path += `${time - last < GAP_S ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}${time - last < GAP_S ? "" : "h0"}`;
      last = value === null ? -Infinity : time;
    });
    return path;
  }

  #caption(values, ago) {
    const when = this.cursor === null ? "" : `, ${Math.round(ago)} s ago`;
    const keys = this.names.map((name, number) =>
      made("span", {}, made("span", { class: `key ${colour(number)}` }), `${name} ${values[number] === null ? "–" : this.say(values[number])}`));
    this.caption.replaceChildren(made("b", {}, this.title + when), ...keys);
    this.svg.setAttribute("aria-label", this.title + when + ": " + keys.map((each) => each.textContent).join(", "));
  }

  // The number of the point at the cursor, which stays at its time.
  #at() {
    const at = this.cursor === null ? -1 : this.points.findIndex(({ time }) => time >= this.cursor);
    return at < 0 ? this.points.length - 1 : at;
  }

  #read(time) {
    this.cursor = time;
    this.draw();
  }

  #point(offset) {
    const width = this.svg.clientWidth;
    if (this.points.length) this.#read(this.points.at(-1).time - ((width - RIGHT - offset) / (width - LEFT - RIGHT)) * this.span);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -60, PageDown: 60, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.#read(null);
    if (step === undefined || !this.points.length) return;
    event.preventDefault();
    this.#read(this.points[Math.min(this.points.length - 1, Math.max(0, this.#at() + step))].time);
  }
}

// The classes of the series of this number: dashed where the colours are used up.
const colour = (number) => `s${number % COLOURS}${number >= COLOURS ? " dashed" : ""}`;
