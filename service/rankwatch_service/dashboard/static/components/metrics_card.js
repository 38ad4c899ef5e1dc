// Any metrics of a job as charts, beside those of other jobs. What is chosen stays in the address; which metrics are
// shown is kept in this browser as well, for all jobs of a project.

import { get } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { words } from "../common/format.js";
import { compared, JOBS_MAX } from "../charts/compared.js";
import { Chart } from "../charts/line_chart.js";
import { metricsOf } from "../charts/series.js";
import { card } from "./shell.js";

const METRICS_MAX = 12;
const JOBS_OFFERED = 100;
const SMOOTHING = { 1: "as measured", 5: "mean of 5 points", 20: "mean of 20 points", 80: "mean of 80 points" };

export class MetricsCard {
  // `query` is that of the address, which `changed` writes and then draws the page.
  constructor(job, query, changed) {
    this.job = job;
    this.query = query;
    this.changed = changed;
    this.charts = new Map(); // by metric: {box, chart, words}
    this.metrics = h("select", { class: "small", "aria-label": "Add a metric", onfocus: () => this.offer(), onchange: () => this.add() });
    this.others = h("select", { class: "small", "aria-label": "Compare with a job", onfocus: () => this.offer(), onchange: () => this.beside() });
    const smooth = query.get("smooth") ?? "1";
    this.smooth = h("select", { class: "small", "aria-label": "Smoothing", onchange: () => this.set("smooth", this.smooth.value === "1" ? "" : this.smooth.value) }, Object.entries(SMOOTHING).map(([value, text]) => h("option", { value, selected: value === smooth }, text)));
    this.log = h("input", { type: "checkbox", checked: query.has("log"), onchange: () => this.set("log", this.log.checked ? "1" : "") });
    this.jobs = h("div", { class: "body beside", hidden: true });
    this.grid = h("div", { class: "charts free" });
    this.none = h("p", { class: "body muted" }, "Add what the script logs, such as the learning rate, and compare it with other jobs.");
    this.card = card("Metrics", h("div", {}, this.jobs, this.none, this.grid), { tools: [this.metrics, this.others, this.smooth, h("label", { class: "inline" }, this.log, " log scale")] });
    this.card.classList.add("metrics");
    this.offer();
  }

  get chosen() {
    return this.query.getAll("metric").slice(0, METRICS_MAX);
  }

  get beyond() {
    return this.query.getAll("with").slice(0, JOBS_MAX - 1);
  }

  // The metrics that were last shown for a job of this project, unless the address names some.
  begin(project) {
    this.key = `metrics of ${project}`;
    if (this.query.has("metric") || this.begun) return;
    this.begun = true;
    for (const one of JSON.parse(localStorage.getItem(this.key) ?? "[]")) this.query.append("metric", one);
  }

  async offer() {
    const [metrics, { items }] = await Promise.all([metricsOf(this.job).catch(() => []), get("jobs", { limit: JOBS_OFFERED }).catch(() => ({ items: [] }))]);
    const options = (first, names, text) => [h("option", { value: "" }, first), names.map((name) => h("option", { value: name }, text(name)))];
    fill(this.metrics, options("Add a metric…", metrics.filter((one) => !this.chosen.includes(one)), words));
    const others = items.map((one) => one.name).filter((name) => name !== this.job && !this.beyond.includes(name));
    fill(this.others, options("Compare with a job…", others, (name) => name));
  }

  add() {
    if (this.metrics.value) this.all("metric", [...this.chosen, this.metrics.value]);
  }

  beside() {
    if (this.others.value) this.all("with", [...this.beyond, this.others.value]);
  }

  move(metric) {
    const [at, rest] = [this.chosen.indexOf(metric), this.chosen.filter((one) => one !== metric)];
    this.all("metric", rest.toSpliced(Math.max(0, at - 1), 0, metric));
  }

  all(name, values) {
    this.query.delete(name);
    for (const one of values) this.query.append(name, one);
    if (name === "metric") localStorage.setItem(this.key, JSON.stringify(values));
    this.offer();
    this.changed();
  }

  set(name, value) {
    if (value) this.query.set(name, value);
    else this.query.delete(name);
    this.changed();
  }

  // Draws what is chosen since a step. `looks` are {attempt, times, numbers}, and `troubled` and `events` those of the page.
  async draw(from, looks, troubled, eventsOf) {
    const [metrics, others] = [this.chosen, this.beyond];
    for (const name of this.charts.keys()) if (!metrics.includes(name)) this.charts.delete(name);
    for (const name of metrics) if (!this.charts.has(name)) this.charts.set(name, this.frame(name));
    const boxes = metrics.map((name) => this.charts.get(name).box);
    if (boxes.length !== this.grid.children.length || boxes.some((box, n) => this.grid.children[n] !== box)) fill(this.grid, boxes);
    this.none.hidden = metrics.length > 0;
    this.jobs.hidden = !others.length;
    fill(this.jobs, "Beside ", others.map((name) => [h("span", { class: "pill" }, name, h("button", { class: "textual", "aria-label": `Without ${name}`, onclick: () => this.all("with", others.filter((one) => one !== name)) }, "×")), " "]));
    await Promise.all(metrics.map((metric) => this.show(metric, [this.job, ...others], from, looks, troubled, eventsOf)));
  }

  async show(metric, names, from, looks, troubled, eventsOf) {
    const { chart, words: said } = this.charts.get(metric);
    const { lines, marks, words: told } = await compared(names, metric, from, { ...looks, smooth: Number(this.smooth.value) });
    const positive = lines.every((one) => one.low.every((value) => value === null || value > 0));
    chart.show(lines, marks, troubled, { events: eventsOf(lines), times: looks.times, log: this.log.checked && positive && lines.length > 0, label: `${words(metric)} of ${names.join(", ")} over ${looks.times ? "time" : "steps"}` });
    said.textContent = told;
  }

  frame(metric) {
    const plot = h("div", { class: "body plot" });
    const said = h("p", { class: "body muted break" });
    const button = (text, label, act) => h("button", { class: "small", "aria-label": `${label} ${words(metric)}`, onclick: act }, text);
    const tools = [button("‹", "Move forward", () => this.move(metric)), button("×", "Remove", () => this.all("metric", this.chosen.filter((one) => one !== metric)))];
    const box = card(words(metric), h("div", {}, plot, said), { tools });
    return { box, chart: new Chart(plot, { metric, label: words(metric) }), words: said };
  }
}
