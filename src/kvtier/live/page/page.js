// Requests the picture every two seconds and shows it. Only the page keeps the history of its charts.

import { Chart } from "./chart.js";
import { Ladder } from "./ladder.js";
import { STATES, TOO_FEW, capacity, count, made, rate, seconds, share, size } from "./words.js";

const EVERY_MS = 2000, HIDDEN_MS = 5000, PATIENCE_MS = 8000;
const KEY = "kvtier-api-key";
const byId = (id) => document.getElementById(id);
const ladder = new Ladder(byId("ladder"));
const charts = {
  hits: new Chart(byId("charts"), "Prompt tokens by source", share, 0.1),
  flows: new Chart(byId("charts"), "Transfer rate", rate, 1024),
  saved: new Chart(byId("charts"), "Prefill time saved per second", seconds, 0.001),
  ttft: new Chart(byId("charts"), "Time to first token", seconds, 0.001),
};
const NEW_MS = 120_000; // for which a restart of the server is shown
let isPaused = false, hasSeen = false, lastSeen = 0, turn = 0, lastAge = 0, begunAnew = -NEW_MS;

async function ask() {
  const headers = {}, key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch("/kvtier/live.json", { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (answer.status === 401) {
    // The answer to an earlier request says nothing about a key that was entered meanwhile.
    if (sessionStorage.getItem(KEY) === key) askForKey(Boolean(key));
    return;
  }
  byId("key").hidden = true;
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error && content.error.message || content.error || `it answers ${answer.status}`);
  show(content);
}

async function turnRound(number) {
  if (number !== turn) return;
  let pause = document.hidden ? HIDDEN_MS : EVERY_MS;
  try {
    if (!isPaused) await ask();
  } catch (error) {
    if (number === turn) sayLost(error);
  }
  setTimeout(turnRound, pause, number);
}

function sayLost(error) {
  const why = error instanceof TypeError || error instanceof DOMException ? "the server does not answer" : error.message;
  // Screen readers read this aloud, so it must change rarely.
  const tens = Math.floor((Date.now() - lastSeen) / 10000);
  const since = lastSeen && tens ? ` The figures are ${seconds(10 * tens)} old.` : "";
  say(`No answer: ${why}. Retrying.${since}`, "bad");
  addToCharts(null);
}

function say(text, level) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.dataset.level = level;
}

function askForKey(wasWrong) {
  sessionStorage.removeItem(KEY);
  say(wasWrong ? "Wrong API key." : "Waiting for the API key.", wasWrong ? "bad" : "plain");
  if (byId("key").hidden) {
    byId("key").hidden = false;
    byId("key-text").focus();
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key-text").value.trim());
  byId("key-text").value = "";
  byId("key").hidden = true;
  turnRound(++turn);
});

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) say("Paused.", "plain");
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) turnRound(++turn);
});

function show(picture) {
  lastSeen = Date.now();
  if (isPaused) return;
  hasSeen = true;
  byId("main").hidden = false;
  showHead(picture);
  if (picture.age_s < lastAge) begunAnew = lastSeen;
  lastAge = picture.age_s;
  say(lastSeen - begunAnew < NEW_MS ? "Live; the server restarted." : "Live", "good");
  showTiles(picture);
  showAnswers(picture.answers);
  ladder.show(picture);
  showPlans(picture);
  showTiers(picture.tiers);
  addToCharts(picture);
}

function showHead({ engine, server, url, tiers }) {
  const where = url ? url.replace(/\/metrics$/, "").replace(/^https?:\/\//, "") : location.host;
  const model = server.models.join(", ");
  byId("engine").textContent = engine === "kvtier" ? "" : `under ${engine}`;
  const sizes = tiers.filter((each) => each.capacity_bytes !== null).map((each) => `${each.name} ${size(each.capacity_bytes)}`);
  const parts = [where, model && `model ${model}`, server.version && `kvtier ${server.version}`,
    server.uptime_s !== null && `up ${seconds(server.uptime_s)}`, ...sizes];
  byId("server").textContent = parts.filter(Boolean).join(" · ");
  document.title = `${model || where} – kvtier`;
}

function showTiles({ hit_share, saved, requests }) {
  const spared = saved.seconds_per_s; // seconds of prefill saved per second, in engines
  const tiles = [
    ["Prompt tokens from cache", hit_share.recent, share],
    ["Prefill time saved per minute", spared, (value) => `${seconds(60 * value)} (${engines(value)})`],
    ["Time to first token", requests.ttft_s, seconds],
    ["Running requests", requests.running, count],
    ["Waiting requests", requests.waiting, count],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, say]) =>
    made("div", {}, made("dt", {}, name), made("dd", value === null ? { class: "none" } : {}, value === null ? TOO_FEW : say(value)))));
}

function engines(value) {
  return value === 1 ? "1 engine" : `${Number(value.toPrecision(2))} engines`;
}

function showAnswers(answers) {
  const list = byId("answer-list");
  answers.forEach((each, at) => {
    let card = list.children[at];
    if (!card) {
      card = made("div", {}, made("h3"), made("p"));
      list.append(card);
    }
    const [title, text] = card.children;
    if (title.textContent !== each.question) title.textContent = each.question;
    if (text.textContent !== each.text) text.textContent = each.text;
    card.dataset.level = each.level;
  });
  while (list.children.length > answers.length) list.lastChild.remove();
}

function showPlans({ loaded, recomputed, loaded_recently, recomputed_recently, guesses }) {
  const some = (value) => (value === null ? "–" : count(value));
  byId("plans").textContent = loaded === null && recomputed === null
    ? "No cached block below the device was requested yet."
    : `Cached blocks below the device: ${some(loaded)} loaded, ${some(recomputed)} recomputed ` +
    `(last minute: ${some(loaded_recently)} and ${some(recomputed_recently)}).`;
  fill("guesses", ["last minute", "expected", "actual", "actual / expected"], guesses.map((each) => [
    each.what === "prefill" ? "prefill" : `load from ${each.what}`,
    seconds(each.expected_s), seconds(each.took_s), each.ratio === null ? TOO_FEW : each.ratio.toFixed(2),
  ]), "Nothing was loaded or computed yet.");
}

function showTiers(tiers) {
  const heads = ["tier", "capacity", "in use", "evicted per second", "turnover time", "requested again after eviction", "median delay", "damaged blocks", "unwritten blocks", "state"];
  fill("tiers", heads, tiers.map((each) => [
    each.name, capacity(each), each.fill === null ? "–" : share(each.fill),
    each.evicted_per_s === null ? "–" : each.evicted_per_s.toFixed(1),
    each.turnover_s === null ? "–" : seconds(each.turnover_s),
    each.evicted ? share(each.returned) : "–", each.return_s === null ? "–" : seconds(each.return_s),
    count(each.damaged), count(each.unwritten), STATES[each.left_alone]?.[0] ?? "–",
  ]), "This engine reports no tiers.");
}

function fill(id, heads, rows, nothing) {
  const table = byId(id);
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

function addToCharts(picture) {
  if (!hasSeen) return;
  const now = Date.now() / 1000, named = (list, name, value) => Object.fromEntries(list.map((each) => [name(each), value(each)]));
  charts.hits.add(now, picture ? named(picture.hits, (each) => each.tier, (each) => each.recent) : {});
  charts.flows.add(now, picture ? named(picture.flows, (each) => `${each.src} → ${each.dst}`, (each) => each.bytes_per_s) : {});
  charts.saved.add(now, picture ? { saved: picture.saved.seconds_per_s } : {});
  charts.ttft.add(now, picture ? { mean: picture.requests.ttft_s } : {});
}

turnRound(++turn);
