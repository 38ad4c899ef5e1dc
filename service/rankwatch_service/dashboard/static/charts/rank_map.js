// The card with a job's heat map: which metric, shaded by what, its rows in which order, or by position in the layout.

import { HeatMap } from "./heat_map.js";
import { rowMedians } from "./heat_values.js";
import { OF_TIME } from "./incident_map.js";
import { parallelGrid } from "./parallel_grid.js";
import { grid, metricsOf } from "./series.js";
import { fill, h } from "../common/dom.js";
import { words } from "../common/format.js";
import { card } from "../components/shell.js";

const HEIGHT_PX = 190;
const COLUMNS = 300;
const PINNED = 6;

export class RankMap {
  // `draw` is called when another choice was made.
  constructor(job, draw) {
    this.job = job;
    this.picked = "";
    const pick = (label, options, changed = draw) => h("select", { class: "small", "aria-label": label, onchange: changed }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));
    this.metric = pick("Metric", {}, () => { this.picked = this.metric.value; draw(); });
    this.shade = pick("Shade by", { relative: "relative to peers", absolute: "absolute" });
    this.order = pick("Order", { rank: "by rank", worst: "highest first", layout: "dp × pp, medians" });
    this.holder = h("div", { class: "body map" });
    this.card = card("Ranks over steps", this.holder, { tools: [this.metric, this.shade, this.order] });
    this.map = null;
    this.first = metricsOf(job).catch(() => null); // asked for before the rest of the page has come
  }

  // `found` is the job as REST shows it; `outlines` are {ranks, from, to, severity, resolved}.
  async draw(found, { from, outlines, timeOf }) {
    const metric = this.#offer((await this.first) ?? (await metricsOf(this.job)));
    this.first = null;
    const cells = metric && (await grid(this.job, metric, COLUMNS, { from }));
    if (!cells) return;
    const ranks = found.topology.ranks ?? [];
    const hosts = new Map(ranks.map((one) => [one.rank, one.host]));
    this.map ??= new HeatMap(this.holder, { height: HEIGHT_PX, names: (rank) => (hosts.get(rank) ? `rank ${rank} on ${hosts.get(rank)}` : `rank ${rank}`) });
    const layout = this.order.value === "layout" ? parallelGrid(cells, ranks) : null;
    this.card.querySelector("h2").textContent = layout ? "Ranks by position" : "Ranks over steps";
    if (layout) {
      this.map.show(layout.grid, { metric, axes: layout.axes });
      return;
    }
    const culprits = outlines.filter((one) => !one.resolved).flatMap((one) => one.ranks);
    this.map.show(cells, { metric, relative: this.shade.value === "relative", outlines, timeOf, pinned: culprits.slice(0, PINNED), order: this.order.value === "worst" ? highestFirst(cells) : null });
  }

  // Keeps what was picked, as far as the job has it.
  #offer(metrics) {
    if (metrics.join() !== [...this.metric.options].map((option) => option.value).join()) {
      const chosen = [this.picked, ...OF_TIME].find((metric) => metrics.includes(metric));
      fill(this.metric, metrics.map((metric) => h("option", { value: metric, selected: metric === chosen }, words(metric))));
    }
    return this.metric.value;
  }
}

// Rows by their median over the steps shown, those without one last.
function highestFirst(cells) {
  const medians = rowMedians(cells.values, cells).map((one) => (Number.isFinite(one) ? one : -Infinity));
  return cells.ranks.map((_, row) => row).sort((a, b) => medians[b] - medians[a]);
}
