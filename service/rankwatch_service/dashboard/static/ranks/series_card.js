// One rank in charts: a metric beside the median of all ranks, and a counter of its GPU beside the median GPU.

import { OF_TIME } from "../charts/incident_map.js";
import { Chart } from "../charts/line_chart.js";
import { around, gpuBesideMedian, metricsOf } from "../charts/series.js";
import { get, now, path } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { lastStep, words } from "../common/format.js";
import { card } from "../components/shell.js";

const STEPS = 500;
const GPU_NS = 900e9;
const GPU_FIRST = "sm_clock_hz";
const GPUS_MAX = 64; // of one host
const PEERS = { median: { name: "median of all ranks", colour: "--accent" } };

export class RankSeriesCard {
  constructor(job, rank) {
    this.job = job;
    this.rank = rank;
    this.metrics = new Picked("Metric", () => this.again());
    this.plot = h("div", { class: "body plot" });
    const legend = h("span", { class: "legend" }, h("i"), "median of all ranks", h("i", { class: "pin0" }), `rank ${rank}`);
    this.card = card("Beside all ranks", this.plot, { tools: [legend, this.metrics.select] });
  }

  // Draws the newest steps of an attempt, up to `step`, with the `incidents` that name the rank.
  async draw(attempt, step, incidents) {
    this.again = () => this.draw(attempt, step, incidents);
    const known = await metricsOf(this.job);
    this.card.hidden = !known.length;
    if (this.card.hidden) return;
    const metric = this.metrics.offer(known, OF_TIME.find((one) => known.includes(one)));
    const from = Math.max(0, step - STEPS);
    const asked = { attempt, from, to: null };
    const look = { [`rank:${this.rank}`]: { name: `rank ${this.rank}`, colour: "--critical" } };
    const [peers, own] = await Promise.all([around(this.job, metric, { ...asked, reduce: "median" }, PEERS), around(this.job, metric, { ...asked, reduce: "none", ranks: [this.rank] }, look)]);
    const spans = incidents.filter((one) => one.attempt === attempt && one.onset_step !== null).map((one) => ({ from: Math.max(from, one.onset_step), to: lastStep(one) ?? step, severity: one.severity }));
    this.chart = fitting(this.chart, this.plot, { metric, label: `${words(metric)} of rank ${this.rank} beside the median of all ranks, over steps` });
    this.chart.show([...peers.lines, ...own.lines], own.marks, spans.filter((one) => one.to >= from));
  }
}

export class RankGpuCard {
  constructor(job) {
    this.job = job;
    this.counters = new Picked("Counter of the GPU", () => this.again());
    this.plot = h("div", { class: "body plot" });
    const legend = h("span", { class: "legend" }, h("i"), "median GPU of the job", h("i", { class: "pin0" }), "its GPU");
    this.card = card("Its GPU and all others", this.plot, { tools: [legend, this.counters.select], hint: "last 15 minutes" });
    this.card.hidden = true;
  }

  // Hidden where the rank has no GPU, or none that was read.
  async draw(host, uuid) {
    this.again = () => this.draw(host, uuid);
    const { items } = uuid ? await get(path("jobs", this.job, "devices"), { kind: "gpu", host, limit: GPUS_MAX }) : { items: [] };
    const gpu = items.find((one) => one.uuid === uuid);
    const known = Object.keys(gpu?.counters ?? {});
    this.card.hidden = !known.length;
    if (this.card.hidden) return;
    const counter = this.counters.offer(known, known.includes(GPU_FIRST) ? GPU_FIRST : known[0]);
    const to = Math.round(now() * 1e6);
    const { lines, marks } = await gpuBesideMedian(this.job, counter, gpu.number, to - GPU_NS, to);
    this.chart = fitting(this.chart, this.plot, { metric: counter, label: `${words(counter)} of ${uuid} beside the median GPU, over time`, times: true });
    this.chart.show(lines, marks);
  }
}

// A select that keeps what was chosen while its options change.
class Picked {
  constructor(label, changed) {
    this.names = [];
    this.select = h("select", { class: "small", "aria-label": label, onchange: changed });
  }

  // Offers these names; returns the one that is chosen.
  offer(names, first) {
    if (names.join("\n") !== this.names.join("\n")) {
      const chosen = names.includes(this.select.value) ? this.select.value : first;
      this.names = names;
      fill(this.select, names.map((name) => h("option", { value: name, selected: name === chosen }, words(name))));
    }
    return this.select.value;
  }
}

// The chart, or a new one in its place if it shows something else: a chart has one unit.
function fitting(chart, plot, looks) {
  return chart?.label === looks.label ? chart : new Chart(fill(plot), looks);
}
