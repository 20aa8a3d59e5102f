// Formats numbers as in the terminal. null means unknown.

export const TOO_FEW = "too few to tell";

// State of a storage tier by the value of its metric: text, and CSS class.
export const STATES = {
  0: ["in use", ""], 1: ["being retried", "warn"], 2: ["paused after errors", "bad"], 3: ["slab cut short", "bad"],
};

const short = (value) => {
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value) || 1)));
  return Number(value.toFixed(Math.min(digits, 3))).toString();
};

export function share(part) {
  if (part === null) return TOO_FEW;
  return part > 0 && part < 0.005 ? "below 1 %" : `${Math.round(100 * part)} %`;
}

export function seconds(value) {
  if (value === null) return TOO_FEW;
  if (!value) return "0 s";
  const units = [[0.9995e-3, 1e-6, "µs"], [0.9995, 1e-3, "ms"], [100, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]];
  const [, unit, name] = units.find(([limit]) => value < limit) || [0, 86400, "d"];
  return `${short(value / unit)} ${name}`;
}

export function count(value) {
  if (value === null) return TOO_FEW;
  if (value >= 1e9) return `${short(value / 1e9)} G`;
  if (value >= 1e6) return `${short(value / 1e6)} M`;
  return value >= 1e4 ? `${short(value / 1e3)} k` : Math.round(value).toString();
}

export function size(bytes) {
  if (bytes === null) return TOO_FEW;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = bytes < 1 ? 0 : Math.min(4, Math.floor(Math.log2(bytes) / 10));
  return `${at ? short(bytes / 1024 ** at) : Math.round(bytes)} ${names[at]}`;
}

// Formats a tier's capacity, in bytes if the engine reports them, else in blocks.
export function capacity({ capacity_bytes: bytes, slots }) {
  if (bytes !== null) return size(bytes);
  return slots === null ? "–" : `${count(slots)} blocks`;
}

// The round number at or above a value at which an axis ends. Its half is round, too.
export function decimal(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 4, 10].find((each) => value / unit <= each + 1e-9);
}
export const binary = (value) => 2 ** Math.ceil(Math.log2(value));
export function clock(value) {
  const unit = value < 100 ? 1 : value < 7200 ? 60 : 3600;
  return unit * decimal(value / unit);
}

export const rate = (bytes) => (bytes === null ? TOO_FEW : `${size(bytes)}/s`);

// Makes an element with text and children. Text is never parsed as HTML.
export function made(tag, attributes = {}, ...children) {
  const isDrawn = ["svg", "g", "rect", "path", "line", "text", "title"].includes(tag);
  const element = isDrawn
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((each) => each !== null));
  return element;
}

// Fills the table of this id. nothing: what it says without rows.
export function fill(id, heads, rows, nothing) {
  const table = document.getElementById(id);
  if (!rows.length) {
    table.replaceChildren(made("tbody", {}, made("tr", {}, made("td", { class: "none" }, nothing))));
    return;
  }
  const states = new Map(Object.values(STATES));
  const kind = (cell) => (cell === TOO_FEW ? "none" : states.get(cell) ?? "");
  table.replaceChildren(
    made("thead", {}, made("tr", {}, ...heads.map((head) => made("th", { scope: "col" }, head)))),
    made("tbody", {}, ...rows.map(([name, ...cells]) =>
      made("tr", {}, made("th", { scope: "row" }, name), ...cells.map((cell, at) => made("td", { class: kind(cell), "data-head": heads[at + 1] }, cell))))));
}
