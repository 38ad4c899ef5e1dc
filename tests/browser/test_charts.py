"""Line charts: round ticks with units, values under the pointer and by keyboard, zoom, and what they cost to load."""

import re

import pytest
from playwright.sync_api import expect
from sqlalchemy import update

from rankwatch_service.simulate.faults import Restart
from rankwatch_service.simulate.job import Job
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Checkpoint, SeriesChunk
from rankwatch_service.store.models import Job as JobRow
from tests.browser.conftest import BAD_STEP, until
from tests.browser.dashboard import S
from tests.support.service.stored_series import store
from tests.support.store.database import add, checkpoint_row

pytestmark = [pytest.mark.browser, pytest.mark.slow]
FIRST_LOAD_BYTES_MAX = 700_000
TIPS = (
    "[...document.querySelectorAll('.chart .tip')].filter((one) => one.checkVisibility()).map((one) => one.textContent)"
)


def line_charts(page):
    charts = page.locator(".charts canvas.line")
    expect(charts).to_have_count(3)
    until(page, "[...document.querySelectorAll('.charts canvas.line')].every((one) => / to step /.test(one.ariaLabel))")
    return charts


def point_at(page, chart, share, **more):
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2, **more)


def test_the_first_load_of_a_job_page_stays_below_700_kilobytes(visit):
    with visit() as one:
        received = []
        client = one.page.context.new_cdp_session(one.page)
        client.send("Network.enable")
        client.send("Network.setCacheDisabled", {"cacheDisabled": True})
        client.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        page = one.goto("/jobs/gpt-small")
        line_charts(page)
        expect(page.locator("canvas.heat")).to_be_visible()
        assert 20_000 < sum(received) < FIRST_LOAD_BYTES_MAX


def test_charts_draw_their_lines_in_colours_of_the_theme(visit):
    for scheme in ("light", "dark"):
        with visit(color_scheme=scheme) as one:
            page = one.goto("/jobs/gpt-small")
            line_charts(page)
            drawn = page.evaluate(
                "(() => { const canvas = document.querySelector('canvas.line');"
                "const hex = getComputedStyle(canvas).getPropertyValue('--accent').trim();"
                "const wanted = [1, 3, 5].map((n) => parseInt(hex.slice(n, n + 2), 16));"
                "const context = canvas.getContext('2d'); let found = 0;"
                "const { data } = context.getImageData(0, 0, canvas.width, canvas.height);"
                "const near = (n) => data[n + 3] && wanted.every((one, at) => Math.abs(one - data[n + at]) <= 16);"
                "for (let n = 0; n < data.length; n += 4) found += near(n) ? 1 : 0;"
                "return found; })()"
            )
            assert drawn > 50


def test_all_charts_show_their_values_at_the_step_under_the_pointer(visit):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        chart = line_charts(page).first
        point_at(page, chart, 0.5)
        until(page, f"{TIPS}.length === 3")
        loss, norm, step_time = page.evaluate(TIPS)
        assert re.match(r"step [\d,]+\nmean \d", loss)
        assert norm.split("\n")[0] == step_time.split("\n")[0] == loss.split("\n")[0]
        assert re.search(r"5–95 % [\d.]+ ms", step_time)
        page.mouse.move(5, 5)
        until(page, f"{TIPS}.length === 0")


def test_dragging_zooms_every_chart_and_a_button_shows_all_again(visit):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        charts = line_charts(page)
        point_at(page, charts.nth(1), 0.4)
        page.mouse.down()
        point_at(page, charts.nth(1), 0.6, steps=4)
        page.mouse.up()
        buttons = page.locator(".charts").get_by_role("button", name="Show all")
        expect(buttons).to_have_count(3)
        point_at(page, charts.nth(0), 0.2)
        until(page, f"{TIPS}.length === 3")
        near_left = int(re.match(r"step ([\d,]+)", page.evaluate(TIPS)[0])[1].replace(",", ""))
        assert near_left > 30, "the left edge is no longer the first step"
        buttons.first.click()
        expect(buttons).to_have_count(0)


def test_the_keyboard_moves_along_a_chart_and_zooms(visit):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        chart = line_charts(page).first
        chart.focus()
        page.keyboard.press("ArrowLeft")
        said = page.locator(".chart").first.get_by_role("status")
        expect(said).to_have_text(re.compile(r"step [\d,]+\s+mean"))
        last = said.text_content()
        page.keyboard.press("ArrowLeft")
        expect(said).not_to_have_text(last)
        page.keyboard.press("+")
        buttons = page.locator(".charts").get_by_role("button", name="Show all")
        expect(buttons).to_have_count(3)
        page.keyboard.press("Escape")
        expect(buttons).to_have_count(0)


def test_the_label_of_a_chart_says_in_words_what_it_shows(visit):
    with visit() as one:
        page = one.goto("/jobs/gpt-small")
        charts = line_charts(page)
        label = charts.first.get_attribute("aria-label")
        assert re.search(r"^Loss over steps\. From step \d+ to step [\d,]+\. mean: [\d.]+ at the end, between ", label)
        assert f"critical incident from step {BAD_STEP}." in label
        # The longer the job runs, the more steps a point holds.
        for chart, mark, step in ((charts.nth(0), "NaN", BAD_STEP), (charts.nth(1), "Inf", BAD_STEP + 1)):
            (marked,) = re.findall(rf"{mark} at step ([\d,]+)\.", chart.get_attribute("aria-label"))
            assert step - 20 < int(marked.replace(",", "")) <= step


TICKS = {
    "valueTicks('step_time_s', [0.081, 0.142], 4, false)": ["100 ms", "120 ms", "140 ms"],
    "valueTicks('loss', [2.297, 2.309], 3, false)": ["2.300", "2.305"],
    "valueTicks('loss', [0.8, 900], 4, true)": ["1", "10", "100"],
    "valueTicks('memory_used_bytes', [6e10, 8.1e10], 3, false)": ["60 GB", "70 GB", "80 GB"],
    "valueTicks('temperature_celsius', [-3, 12], 3, false)": ["0 °C", "5 °C", "10 °C"],
    "valueTicks('x', [1, 1], 3, false)": [],
    "valueTicks('sm_clock_hz', [1.937e9, 1.963e9], 2.6, false)": ["1.94 GHz", "1.95 GHz", "1.96 GHz"],
    "stepTicks([980, 5_020], 5)": ["1,000", "2,000", "3,000", "4,000", "5,000"],
    "stepTicks([3, 5], 9)": ["3", "4", "5"],
}


def test_ticks_are_round_in_the_unit_that_is_shown(dashboard):
    script = f"""async () => {{
      const base = document.querySelector('link[rel=modulepreload]').href.replace('common/api.js', '');
      const {{ valueTicks, stepTicks }} = await import(`${{base}}charts/scales.js`);
      return [{", ".join(TICKS)}].map((ticks) => ticks.map(([, label]) => label));
    }}"""
    assert dashboard.page.evaluate(script) == [*TICKS.values()]


MODULES = "document.querySelector('link[rel=modulepreload]').href.replace('common/api.js', 'charts/')"
MAP_OF_1024 = f"""async ([order, width]) => {{
  const charts = {MODULES};
  const {{ HeatMap }} = await import(`${{charts}}heat_map.js`);
  const [ranks, steps] = [1024, 100];
  const values = Float32Array.from({{ length: ranks * steps }}, (_, cell) => {{
    const [rank, step] = [Math.floor(cell / steps), cell % steps];
    return rank === 517 && step >= 50 ? 2 : 1 + 0.01 * ((rank * 31 + step * 17) % 7);
  }});
  const holder = document.createElement('div');
  holder.style.width = `${{width}}px`;
  document.querySelector('main').replaceChildren(holder);
  const map = new HeatMap(holder, {{ height: 190 }});
  const upTo = (length) => Array.from({{ length }}, (_, n) => n);
  const kinds = new Uint8Array(ranks * steps);
  const grid = {{ steps: upTo(steps), ranks: upTo(ranks), rankCount: ranks, values, kinds }};
  const outlines = [{{ ranks: [517], from: 50, to: null, severity: 'warning' }},
                    {{ ranks: [], from: 20, to: 30, severity: 'critical' }}];
  map.show(grid, {{ metric: 'busy_s', relative: true, outlines, pinned: [517] }});
  map.draw();
  const context = map.canvas.getContext('2d');
  const at = (x, y) => [...context.getImageData(x, y, 1, 1).data].slice(0, 3).join();
  const {{ left, lines, columnPx, pins }} = map.frame;
  const x = (column) => Math.round(left + (column + 0.5) * columnPx);
  const row = lines.findIndex((one, n) => n >= pins && one.rows.includes(517));
  const middle = (line) => Math.round(lines[line].top + lines[line].height / 2 - 0.5);
  return {{ pins, pinned: lines[0].rows, tall: lines[0].height,
           before: at(x(40), middle(0)), after: at(x(70), middle(0)),
           folded: at(x(70), middle(row)),
           whole: at(x(25), middle(row)), label: map.canvas.ariaLabel,
           medians: map.frame.medians }};
}}"""


def test_a_map_of_1024_ranks_shows_the_slow_one_and_brackets_hide_no_data(dashboard):
    found = dashboard.page.evaluate(MAP_OF_1024, ["rank", 1200])
    assert (found["pins"], found["pinned"]) == (1, [517])
    assert found["tall"] > 8, "the culprit has a line of its own above all"
    assert found["after"] == found["folded"] == "255,233,69", "the slow rank is bright in its place too"
    assert found["before"] not in (found["after"], "229,52,43")
    assert found["whole"] != "229,52,43", "an incident of all ranks is drawn above the map"
    assert found["medians"] is True
    assert re.search(r"1,024 ranks over steps 0 to 99\. Highest over all these steps: rank \d+, ", found["label"])
    assert dashboard.page.evaluate(MAP_OF_1024, ["rank", 360])["medians"] is False


def test_ranks_by_position_are_compared_within_their_stage(dashboard):
    script = f"""async () => {{
      const charts = {MODULES};
      const {{ parallelGrid }} = await import(`${{charts}}parallel_grid.js`);
      const place = (rank) => ({{ rank, tp: rank % 2, dp: Math.floor(rank / 2) % 2, pp: Math.floor(rank / 4) }});
      const topology = Array.from({{ length: 8 }}, (_, rank) => place(rank));
      const usual = ({{ pp }}) => (pp ? 4 : 1);
      const later = (one) => (one.rank === 6 ? 6 : usual(one));
      const values = Float32Array.from(topology.flatMap((one) => [usual(one), later(one), later(one)]));
      const ranks = topology.map((one) => one.rank);
      const cells = {{ steps: [0, 1, 2], ranks, rankCount: 8, values, kinds: new Uint8Array(24) }};
      const {{ grid, axes }} = parallelGrid(cells, topology);
      const ratios = [...grid.values].map((one) => Math.round(one * 100) / 100);
      return [ratios, axes.tip(3).split('\\n')[0], parallelGrid(cells, [])];
    }}"""
    values, tip, unknown = dashboard.page.evaluate(script)
    assert values == [1, 1, 0.8, 1.2], "stage 1 is longer as a whole, and one position of it differs"
    assert tip == "dp 1 · pp 1 · ranks 6, 7"
    assert unknown is None


def test_times_are_labelled_at_round_times_of_the_local_zone(dashboard):
    script = """async () => {
      const base = document.querySelector('link[rel=modulepreload]').href.replace('common/api.js', '');
      const { timeTicks } = await import(`${base}charts/scales.js`);
      const from = Date.UTC(2026, 0, 5, 8, 10);
      return timeTicks([from, from + 3_600_000], 4).map(([, label]) => label);
    }"""
    assert dashboard.page.evaluate(script) == ["13:45", "14:00", "14:15", "14:30"], "the visitor is in UTC+5:30"


def test_charts_of_a_job_note_its_checkpoints(dashboard):
    store(dashboard.api.engine, Job(world_size=4, steps=80))
    rows = [checkpoint_row("gpt", step, id=f"local:launch0.0:{step}", attempt="launch0.0") for step in (3, 5)]
    add(dashboard.api.engine, Checkpoint, *rows)
    page = dashboard.goto("/jobs/gpt")
    chart = page.get_by_role("img", name=re.compile("^Loss over steps"))
    expect(chart).to_have_attribute(
        "aria-label", re.compile("saved at step 5. saved at step 3|saved at step 3. saved at")
    )


def test_over_time_charts_share_a_cursor_note_changes_of_the_configuration_and_keep_the_axis_in_the_address(dashboard):
    store(dashboard.api.engine, Job(world_size=4, steps=120).inject(Restart(80, to_step=40)))
    began = dashboard.now - 240 * S
    changes = [{"what": "rules on metrics changed", "step": 20, "unix_ns": began + 60 * S}]
    with write(dashboard.api.engine) as connection:
        for attempt, first, last, at in (("launch0.0", 0, 80, began), ("launch1.0", 40, 119, began + 120 * S)):
            ran = {"first_step": first, "last_step": last, "started_unix_ns": at}
            connection.execute(update(Attempt).where(Attempt.attempt == attempt).values(**ran))
        connection.execute(update(JobRow).values(configuration=changes, step=119))
        connection.execute(
            update(SeriesChunk).where(SeriesChunk.attempt == "launch0.0").values(at_unix_ns=began + 120 * S)
        )
    page = dashboard.goto("/jobs/gpt")
    chart = line_charts(page).first
    expect(chart).to_have_attribute("aria-label", re.compile("rules on metrics changed at step 20"))
    page.get_by_label("Axis").select_option("time")
    expect(page).to_have_url(re.compile(r"\?axis=time$"))
    over_time = re.compile(
        r"^Loss over time\. From (\d\d:\d\d:\d\d) to .*rules on metrics changed at \d.*attempt 2 at \d"
    )
    expect(chart).to_have_attribute("aria-label", over_time)
    page.reload()
    expect(page.get_by_role("img", name=over_time)).to_be_visible()
    expect(page.get_by_role("img", name=re.compile(r"^Step time.* over time\. "))).to_be_visible()
    until(page, "/over steps [0-9]/.test(document.querySelector('canvas.heat')?.ariaLabel)")
    point_at(page, page.locator(".charts canvas.line").first, 0.25)
    until(page, f"{TIPS}.length === 3")
    tips = page.evaluate(TIPS)
    assert len({re.match(r"\d\d:\d\d:\d\d\n", tip)[0] for tip in tips}) == 1
    assert "attempt launch0.0" in tips[0]
    expect(page.locator(".heatbox .hair")).to_be_visible()


WRITTEN = """const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  (window.written ??= new Set()).add(text);
  return write.call(this, text, ...place);
};"""
"""Keeps what charts write."""

NOTES = """async (url) => {
  const { paintNotes } = await import(url);
  const context = document.createElement("canvas").getContext("2d");
  context.font = "11px sans-serif";
  const drawn = [];
  context.fillText = (text, x, y) => drawn.push({ text, x, y, to: x + context.measureText(text).width });
  const frame = { left: 0, right: 600, top: 0, bottom: 200, x: [0, 600], y: [0, 1] };
  const name = (n) => (n % 3 ? "captured" : `declared: learning rate ${n}`);
  const events = [...Array(40).keys()].map((n) => ({ step: 15 * n, text: name(n) }));
  paintNotes(context, frame, events, () => "#000");
  return drawn;
}"""


def test_notes_never_stand_on_each_other_and_long_ones_are_cut(dashboard):
    page = dashboard.goto("/jobs")
    module = page.evaluate("new URL('../charts/line_paint.js', document.querySelector('script[type=module]').src).href")
    notes = page.evaluate(NOTES, module)
    assert len(notes) > 6
    assert max(len(note["text"]) for note in notes) == 24
    for one in notes:
        for other in notes:
            assert one is other or one["y"] != other["y"] or one["x"] >= other["to"] or other["x"] >= one["to"]


def test_each_attempt_has_a_line_of_its_own_which_a_picker_chooses(dashboard):
    store(dashboard.api.engine, Job(world_size=4, steps=120).inject(Restart(80, to_step=40)))
    dashboard.page.add_init_script(WRITTEN)
    page = dashboard.goto("/jobs/gpt")
    until(page, "window.written?.has('launch0.0')")
    assert not page.evaluate("window.written.has('launch1.0')"), "the line of the newest attempt needs no name"
    chart = line_charts(page).first
    expect(chart).to_have_attribute(
        "aria-label", re.compile(r"From step 0 to step 119\. attempt launch0\.0: .* mean: .*")
    )
    point_at(page, chart, 0.5)
    said = page.locator(".chart .tip").first
    expect(said).to_have_text(re.compile(r"step [5-6]\d\nattempt launch0\.0 [\d.]+\nmean [\d.]+"))
    page.get_by_label("Attempt shown").select_option("launch0.0")
    expect(chart).to_have_attribute("aria-label", re.compile(r"From step 0 to step 80\. mean: "))
    page.get_by_label("Attempt shown").select_option("launch1.0")
    expect(chart).to_have_attribute("aria-label", re.compile(r"From step 4\d to step 119\. mean: "))
