// What only a node has: engines, tenants, rooms.

import { Memory } from "./memory.js";
import { TOO_FEW, clock, count, decimal, fill, seconds, share, size } from "./words.js";

const memory = new Memory(document.getElementById("memory"));
const waiting = ({ node }) => node.engines.reduce((sum, each) => sum + each.waiting, 0);

// As ENGINE_TILES and ENGINE_CHARTS of the page.
export const NODE_TILES = [
  ["Looked-up blocks found", ({ hit_share }) => hit_share.recent, share],
  ["Look-ups per second", ({ node }) => node.lookups_per_s, (value) => (value < 10 ? value.toFixed(1) : count(value))],
  ["Look-up time", ({ node }) => node.lookup_s, seconds, ({ node }) => node.lookup_p95_s !== null && `p95 ${seconds(node.lookup_p95_s)}`],
  ["Engines", ({ node }) => node.engines.length, count, (picture) => `${count(waiting(picture))} requests waiting`],
];
export const NODE_CHARTS = [
  ["found", "Looked-up blocks found, by tenant", share, decimal, 0.1],
  ["lookups", "Look-up time", seconds, clock, 0.0001],
  ["waiting", "Waiting requests", count, decimal, 4],
];

export function showNode(node) {
  memory.show(node);
  fill("engines", ["engine", "tenant", "processes", "slots in use", "waiting requests", "late calls", "pauses"], node.engines.map((each) => [
    each.name, each.tenant, ...[each.processes, each.slots, each.waiting, each.failures, each.pauses].map(count),
  ]), "No engine is attached.");
  const tiers = [...new Set([...node.tenants, ...node.rooms].flatMap((each) => Object.keys(each.used_bytes)))];
  const used = (each) => tiers.map((tier) => size(each.used_bytes[tier] ?? 0));
  const hasDisk = node.tenants.some((each) => each.slab_bytes || each.disk_floor_bytes || each.disk_ceiling_bytes);
  const onDisk = (each) => [each.slab_bytes, each.disk_floor_bytes, each.disk_ceiling_bytes].map((bytes) => (bytes === null ? "none" : size(bytes)));
  fill("tenants", ["tenant", "engines", "found", "memory", "pinned", "floor", "ceiling", ...(hasDisk ? ["slabs", "disk floor", "disk ceiling"] : []), ...tiers.map((tier) => `blocks in ${tier}`)], node.tenants.map((each) => [
    each.name, count(each.engines), each.found === null ? TOO_FEW : share(each.found),
    ...[each.memory_bytes, each.pinned_bytes, each.floor_bytes, each.ceiling_bytes].map(size), ...(hasDisk ? onDisk(each) : []), ...used(each),
  ]), "No tenant has used the node yet.");
  fill("rooms", ["room", "tenant", "block size", "segments", ...tiers.map((tier) => `blocks in ${tier}`)], node.rooms.map((each) => [
    each.name, each.tenant, size(each.block_bytes), count(each.segments), ...used(each),
  ]), "No engine has opened a room yet.");
}
