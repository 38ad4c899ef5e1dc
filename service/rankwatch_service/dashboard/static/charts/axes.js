// What the charts of a page share on one axis, steps or time: the place under the pointer, and the range zoomed into.

class Axis {
  at = null;
  range = null;
  #charts = new Set();

  // A chart has `draw()`, `pointed()` and an `element`; it is forgotten when that has left the page.
  join(chart) {
    this.#charts.add(chart);
  }

  leave(chart) {
    this.#charts.delete(chart);
  }

  // All charts show their values at this place; null: none.
  point(at) {
    if (at === this.at) return;
    this.at = at;
    for (const chart of this.charts()) chart.pointed();
  }

  // All charts show [from, to]; null: all that they have.
  zoom(range) {
    this.range = range;
    for (const chart of this.charts()) chart.draw();
  }

  charts() {
    for (const chart of this.#charts) if (chart.drawn && !chart.element.isConnected) this.leave(chart);
    return [...this.#charts];
  }
}

export const AXES = { step: new Axis(), time: new Axis() };

addEventListener("themechange", () => {
  for (const axis of Object.values(AXES)) for (const chart of axis.charts()) chart.draw();
});
