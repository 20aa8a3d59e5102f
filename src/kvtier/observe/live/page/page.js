// Requests the picture every two seconds and shows it. The server keeps the last hour of the charts.

import { Chart } from "./chart.js";
import { Ladder } from "./ladder.js";
import { NODE_CHARTS, NODE_TILES, showNode } from "./node.js";
import { STATES, TOO_FEW, binary, capacity, clock, count, decimal, fill, made, rate, seconds, share } from "./words.js";

const EVERY_MS = 2000, HIDDEN_MS = 5000, PATIENCE_MS = 8000;
const HOUR_S = 3600;
const KEY = "kvtier-api-key";
const byId = (id) => document.getElementById(id);
const ladder = new Ladder(byId("ladder"));
// Charts: id, title, format of a value, function that rounds the end of the axis, and its least end.
const FLOWS = ["flows", "Transfer rate", rate, binary, 1024];
const ENGINE_CHARTS = [
  ["hits", "Prompt tokens by source", share, decimal, 0.1],
  FLOWS,
  ["saved", "Prefill time saved per second", seconds, clock, 0.001],
  ["ttft", "Time to first token", seconds, clock, 0.001],
];
// Tiles: title, value, format, and what stands below it.
const ENGINE_TILES = [
  ["Prompt tokens from cache", ({ hit_share }) => hit_share.recent, share],
  // Seconds of prefill saved per second, in engines.
  ["Prefill time saved per minute", ({ saved }) => saved.seconds_per_s, (value) => seconds(60 * value), ({ saved }) => `${engines(saved.seconds_per_s)}’ worth`],
  ["Time to first token", ({ requests }) => requests.ttft_s, seconds, ({ requests }) => requests.ttft_p95_s !== null && `p95 ${seconds(requests.ttft_p95_s)}`],
  ["Running requests", ({ requests }) => requests.running, count, ({ requests }) => requests.waiting !== null && `${count(requests.waiting)} waiting`],
];
let charts = null, points = [], needsHour = true;
const NEW_MS = 120_000; // for which a restart of the server is shown
let isPaused = false, hasSeen = false, lastSeen = 0, turn = 0, lastAge = 0, begunAnew = -NEW_MS;

async function ask() {
  const headers = {}, key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const path = `/kvtier/live.json${needsHour ? "?hour=1" : ""}`;
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
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
  needsHour = true;
  addToCharts({});
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
  needsHour = true;
});

document.addEventListener("visibilitychange", () => {
  needsHour = true;
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
  for (const [id, isShown] of [["node", picture.node], ["memory-section", picture.node], ["rooms-section", picture.node], ["plans-section", !picture.node]]) {
    byId(id).hidden = !isShown;
  }
  if (picture.node) showNode(picture.node);
  if (picture.hour) takeHour(picture.hour);
  addToCharts(picture.charts);
}

function showHead({ engine, server, url }) {
  const where = url ? url.replace(/\/metrics$/, "").replace(/^https?:\/\//, "") : location.host;
  const model = server.models.join(", ");
  byId("engine").textContent = { kvtier: "", "kvtier node": "node" }[engine] ?? `under ${engine}`;
  const parts = [where, model && `model ${model}`, server.version && `kvtier ${server.version}`,
    server.uptime_s !== null && `up ${seconds(server.uptime_s)}`];
  byId("server").textContent = parts.filter(Boolean).join(" · ");
  document.title = `${model || where} – kvtier`;
}

function showTiles(picture) {
  byId("tiles").replaceChildren(...(picture.node ? NODE_TILES : ENGINE_TILES).map(([name, pick, say, below]) => {
    const value = pick(picture), isKnown = value !== null, more = isKnown && below && below(picture);
    return made("div", {}, made("dt", {}, name), made("dd", isKnown ? {} : { class: "none" }, isKnown ? say(value) : TOO_FEW),
      more ? made("dd", { class: "below" }, more) : null);
  }));
  byId("minute").textContent = `Figures of requests ${picture.minute}${picture.minute.endsWith("request") ? `, ${seconds(10 * Math.floor(picture.quiet_s / 10))} ago` : ""}.`;
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

function showPlans({ loaded, recomputed, loaded_recently, recomputed_recently, guesses, minute }) {
  const some = (value) => (value === null ? "–" : count(value));
  byId("plans").textContent = loaded === null && recomputed === null
    ? "No cached block below the device was requested yet."
    : `Cached blocks below the device: ${some(loaded)} loaded, ${some(recomputed)} recomputed ` +
    `(${minute} ${some(loaded_recently)} and ${some(recomputed_recently)}).`;
  fill("guesses", [minute, "expected", "actual", "actual / expected"], guesses.map((each) => [
    each.what === "prefill" ? "prefill" : `load from ${each.what}`,
    seconds(each.expected_s), seconds(each.took_s), each.ratio === null ? TOO_FEW : each.ratio.toFixed(2),
  ]), "Nothing was loaded or computed yet.");
}

function showTiers(tiers) {
  const heads = ["tier", "capacity", "in use", "evicted per second", "turnover time", "requested again after eviction", "median delay", "damaged blocks", "audited hits", "unwritten blocks", "state"];
  fill("tiers", heads, tiers.map((each) => [
    each.name, capacity(each), each.fill === null ? "–" : share(each.fill),
    each.evicted_per_s === null ? "–" : each.evicted_per_s.toFixed(1),
    each.turnover_s === null ? "–" : seconds(each.turnover_s),
    each.evicted ? share(each.returned) : "–", each.return_s === null ? "–" : seconds(each.return_s),
    count(each.damaged), audits(each), count(each.unwritten), STATES[each.left_alone]?.[0] ?? "–",
  ]), "This engine reports no tiers.");
}

function audits(tier) {
  return count(tier.audited) + (tier.different ? `, ${count(tier.different)} different` : "");
}

// What this page has seen before the server's hour stays: the server may have restarted.
function takeHour({ ages_s: ages, charts }) {
  needsHour = false;
  const now = Date.now() / 1000, begin = now - (ages[0] ?? 0);
  const at = (number) => mapped(charts, (series) => mapped(series, (line) => line[number]));
  points = [...points.filter(({ time }) => time < begin), ...ages.map((age, number) => ({ time: now - age, charts: at(number) }))];
}

const mapped = (values, change) => Object.fromEntries(Object.entries(values).map(([name, value]) => [name, change(value)]));

function addToCharts(values) {
  if (!hasSeen) return;
  const now = Date.now() / 1000;
  points = [...points.filter(({ time }) => time > now - HOUR_S), { time: now, charts: values }];
  drawCharts();
}

function drawCharts() {
  charts ??= (byId("node").hidden ? ENGINE_CHARTS : [NODE_CHARTS[0], FLOWS, ...NODE_CHARTS.slice(1)]).map((each) => new Chart(byId("charts"), ...each));
  if (points.length) for (const chart of charts) chart.show(points, Number(byId("span").value));
}

byId("span").addEventListener("change", drawCharts);
const isWide = matchMedia("(min-width: 40rem)").matches; // on a telephone all but tiers and answers is folded
for (const each of document.querySelectorAll("details")) each.open = isWide;
turnRound(++turn);
