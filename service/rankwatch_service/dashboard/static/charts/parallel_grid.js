// The ranks of a job as data-parallel × pipeline positions, each with its median over time against its stage: where in the
// layout a job is slow. The ranks of a position (tensor, context, expert parallel) share a cell, which shows the highest.

import { KIND, medianOf, rowMedians } from "./heat_values.js";
import { rankList } from "../common/format.js";

// {grid, axes} for HeatMap; null where a job has neither several stages nor several replicas, or its layout is unknown.
export function parallelGrid(found, topology) {
  const placed = (topology ?? []).filter((one) => Number.isInteger(one.dp) && Number.isInteger(one.pp));
  const distinct = (key) => [...new Set(placed.map((one) => one[key]))].sort((a, b) => a - b);
  const [dps, pps] = [distinct("dp"), distinct("pp")];
  if (found.ranks.length < placed.length || dps.length * pps.length < 2) return null;
  const medians = new Map(rowMedians(found.values, found).map((value, row) => [found.ranks[row], value]));
  const cells = Array.from({ length: dps.length * pps.length }, () => []);
  for (const { rank, dp, pp } of placed) cells[pps.indexOf(pp) * dps.length + dps.indexOf(dp)].push(rank);
  const values = new Float32Array(cells.length);
  const kinds = new Uint8Array(cells.length).fill(KIND.MISSING);
  pps.forEach((_, row) => {
    const own = cells.slice(row * dps.length, (row + 1) * dps.length).map((ranks) => Math.max(...ranks.map((rank) => medians.get(rank)).filter(Number.isFinite)));
    const known = own.filter(Number.isFinite);
    const usual = known.length ? medianOf(known) : 0;
    own.forEach((value, column) => {
      if (!Number.isFinite(value) || usual === 0) return;
      values[row * dps.length + column] = value / usual;
      kinds[row * dps.length + column] = KIND.FINITE;
    });
  });
  const tip = (cell) => `dp ${dps[cell % dps.length]} · pp ${pps[Math.floor(cell / dps.length)]} · ${rankList(cells[cell])}\nmedian over the steps, against its stage`;
  return { grid: { steps: dps, ranks: pps, rankCount: pps.at(-1) + 1, values, kinds }, axes: { row: (pp) => `pp ${pp}`, column: (dp) => `dp ${dp}`, tip, what: "data-parallel by pipeline position" } };
}
