// The devices of a job of one kind, of all hosts or of one: a counter over time, and the devices with its highest
// values, after ports that are down. Hidden while none has reported.

import { get, now, path } from "../common/api.js";
import { Chart } from "../charts/line_chart.js";
import { fill, h } from "../common/dom.js";
import { measured, moment, rankList, words } from "../common/format.js";
import { deviceFan } from "../charts/series.js";
import { card, seesEveryJob } from "./shell.js";

// The first column is the counter that is shown first.
const KINDS = {
  gpu: {
    title: "Devices",
    columns: ["temperature_celsius", "power_w", "sm_clock_hz", "utilization_ratio", "memory_used_bytes"],
    nameOf: (one) => `${one.host} GPU ${one.index}`,
  },
  port: {
    title: "Network ports",
    columns: ["received_bytes_per_s", "link_up", "sent_bytes_per_s", "link_bits_per_s", "link_downs", "port_errors"],
    nameOf: (one) => `${one.host} ${one.uuid}`,
  },
  host: {
    title: "Hosts",
    columns: ["cpu_pressure_ratio", "cpu_utilization_ratio", "memory_available_bytes", "io_pressure_ratio", "disk_busy_ratio", "checkpoint_free_bytes", "checkpoint_request_s"],
    nameOf: (one) => one.host,
  },
};
const LISTED = 8;
const READ_MAX = 500; // devices of which the highest are listed
const RANGES = { "last 15 minutes": 900, "last 2 hours": 7200, "last day": 86_400 };

export class DevicesCard {
  constructor(job, kind, host = null) {
    this.job = job;
    this.host = host;
    this.kind = kind;
    this.looks = KINDS[kind];
    this.counters = "";
    this.plot = h("div", { class: "plot" });
    this.table = h("div", { class: "wide", tabindex: "0" });
    this.pick = h("select", { class: "small", "aria-label": "Counter", onchange: () => this.draw() });
    this.range = h("select", { class: "small", "aria-label": "Time shown", onchange: () => this.draw() }, Object.entries(RANGES).map(([name, seconds]) => h("option", { value: seconds }, name)));
    const legend = h("span", { class: "legend" }, h("i", { class: "median" }), "median", h("i", { class: "band" }), "5–95 %", h("i", { class: "max" }), "highest");
    this.card = card(this.looks.title, h("div", {}, this.plot, this.table), { tools: [legend, this.pick, this.range] });
    this.card.classList.add("devices");
    this.card.hidden = true;
    this.chart = null;
  }

  async draw() {
    const [{ items }, listed] = await Promise.all([
      get(path("jobs", this.job, "devices", "counters"), { kind: this.kind }),
      get(path("jobs", this.job, "devices"), { kind: this.kind, host: this.host, limit: READ_MAX }),
    ]);
    this.seesHosts = await seesEveryJob();
    this.card.hidden = !items.length || !listed.items.length;
    if (this.card.hidden) return;
    this.#offer(items);
    const counter = this.pick.value;
    if (this.chart?.metric !== counter) {
      fill(this.plot);
      this.chart = new Chart(this.plot, { metric: counter, label: `${words(counter)} of the job's ${this.looks.title.toLowerCase()} over time: median, 5th to 95th percentile, highest`, times: true });
    }
    const from = Math.floor((now() / 1e3 - Number(this.range.value)) * 1e9);
    const numbers = this.host === null ? null : listed.items.map((one) => one.number).join();
    const over = await deviceFan(this.job, this.kind, counter, from, numbers);
    await this.chart.show(over.lines, over.marks);
    this.#list(listed.items, counter, listed.next_cursor !== null);
  }

  #offer(counters) {
    if (counters.join() === this.counters) return;
    const chosen = this.pick.value || (counters.includes(this.looks.columns[0]) ? this.looks.columns[0] : counters[0]);
    this.counters = counters.join();
    fill(this.pick, counters.map((counter) => h("option", { value: counter, selected: counter === chosen }, words(counter))));
  }

  // Pages of hosts are for those who may see every job.
  #named(one) {
    const name = h("b", {}, this.looks.nameOf(one));
    return this.seesHosts ? h("a", { href: `/hosts/${encodeURIComponent(one.host)}` }, name) : name;
  }

  #list(devices, counter, more) {
    const columns = [...new Set([counter, ...this.looks.columns])].filter((name) => devices.some((one) => name in one.counters));
    const height = (one) => one.counters[counter] ?? -Infinity;
    const isDown = (one) => one.counters.link_up === 0;
    const highest = devices.sort((a, b) => isDown(b) - isDown(a) || height(b) - height(a) || a.number - b.number).slice(0, LISTED);
    fill(
      this.table,
      h(
        "table",
        { class: "compact" },
        h("thead", {}, h("tr", {}, h("th", {}, more ? `Name, of the ${READ_MAX} seen last` : "Name"), this.kind === "gpu" && h("th", {}, "Used by"), columns.map((name) => h("th", { class: "right" }, name === "link_up" ? "Link" : words(name))))),
        h("tbody", {}, highest.map((one) =>
          h("tr", { title: `read ${moment(one.at_unix_ns)}` },
            h("td", { class: "break", title: one.uuid }, this.#named(one)),
            this.kind === "gpu" && h("td", { class: "muted" }, one.ranks.length ? rankList(one.ranks, 3) : "not known"),
            columns.map((name) => h("td", { class: "right nowrap" }, measured(name, one.counters[name] ?? null))),
          ),
        )),
      ),
    );
  }
}
