// A few curves over time, as SVG. Values are shown by the pointer, or by the arrow keys.

import { made } from "./words.js";

const HEIGHT = 110, LEFT = 68, TOP = 8, BOTTOM = 18, RIGHT = 6;
const MOST = 900; // most points: half an hour

export class Chart {
  // say: formats a value. top: least upper end of the axis.
  constructor(parent, title, say, top) {
    this.say = say;
    this.top = top;
    this.title = title;
    this.times = [];
    this.series = new Map(); // by name: one value or null per time
    this.cursor = null;
    this.svg = made("svg", { tabindex: 0, role: "img", height: HEIGHT });
    this.caption = made("figcaption");
    parent.append(made("figure", {}, this.caption, this.svg));
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#read(null));
    this.svg.addEventListener("blur", () => this.#read(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  // values: by name; null for an unknown value. All null is a gap.
  add(time, values) {
    for (const name of Object.keys(values)) {
      if (!this.series.has(name)) this.series.set(name, this.times.map(() => null));
    }
    this.times.push(time);
    for (const [name, line] of this.series) line.push(values[name] ?? null);
    if (this.times.length > MOST) {
      this.times.shift();
      for (const line of this.series.values()) line.shift();
      if (this.cursor !== null) this.cursor = Math.max(0, this.cursor - 1);
    }
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.times.length) return;
    const span = Math.max(60, this.times.at(-1) - this.times[0]);
    const values = [...this.series.values()].flat().filter((each) => each !== null);
    const most = Math.max(this.top, ...values);
    const x = (time) => width - RIGHT - ((this.times.at(-1) - time) / span) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const value of [0, most / 2, most]) {
      parts.push(made("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      const text = made("text", { class: "axis", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
      text.textContent = values.length ? this.say(value) : "";
      parts.push(text);
    }
    if (!values.length) {
      const text = made("text", { class: "axis", x: (LEFT + width - RIGHT) / 2, y: y(most / 2) - 6, "text-anchor": "middle" });
      text.textContent = "nothing yet";
      parts.push(text);
    }
    for (const [at, text, anchor] of [[LEFT, `${Math.round(span / 60)} min ago`, "start"], [width - RIGHT, "now", "end"]]) {
      const label = made("text", { class: "axis", x: at, y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = text;
      parts.push(label);
    }
    [...this.series.values()].forEach((line, number) => {
      parts.push(made("path", { class: `series s${number % 6}`, d: this.#path(line, x, y) }));
    });
    if (this.cursor !== null) {
      const at = x(this.times[this.cursor]);
      parts.push(made("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.scale = { span, width };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    this.#caption();
  }

  #path(line, x, y) {
    let path = "", isDown = false;
    line.forEach((value, at) => {
      if (value !== null) path += `${isDown ? "L" : "M"}${x(this.times[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = value !== null;
    });
    return path;
  }

  #caption() {
    const at = this.cursor ?? this.times.length - 1;
    const ago = Math.round(this.times.at(-1) - this.times[at]);
    const when = this.cursor === null ? "" : `, ${ago} s ago`;
    const keys = [...this.series].map(([name, line], number) => {
      const value = line[at] === null ? "–" : this.say(line[at]);
      return made("span", {}, made("span", { class: `key s${number % 6}` }), `${name} ${value}`);
    });
    this.caption.replaceChildren(made("b", {}, this.title + when), ...keys);
    this.svg.setAttribute("aria-label", this.title + when + ": " + keys.map((each) => each.textContent).join(", "));
  }

  #read(at) {
    this.cursor = at;
    this.draw();
  }

  #point(offset) {
    if (!this.scale) return;
    const { span, width } = this.scale;
    const time = this.times.at(-1) - ((width - RIGHT - offset) / (width - LEFT - RIGHT)) * span;
    const at = this.times.findIndex((each) => each >= time);
    this.#read(at < 0 ? this.times.length - 1 : at);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -60, PageDown: 60, Home: -MOST, End: MOST }[event.key];
    if (event.key === "Escape") this.#read(null);
    if (step === undefined) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.#read(Math.min(last, Math.max(0, (this.cursor ?? last) + step)));
  }
}
