// What the cells of a heat map amount to: ratios to peers, ranges of colours, and medians over time.

export const KIND = { FINITE: 0, NAN: 1, INF: 2, MINUS_INF: 3, MISSING: 4 };

const SIGMAS = 8;
const SIGMA_MIN = 0.005;

// Each cell as its ratio to the median of its column, so that ranks which differ from peers stand out.
export function againstMedian(grid) {
  const columns = grid.steps.length;
  const ratios = new Float32Array(grid.values.length);
  for (let column = 0; column < columns; column += 1) {
    const finite = [];
    for (let cell = column; cell < grid.values.length; cell += columns) if (grid.kinds[cell] === KIND.FINITE) finite.push(grid.values[cell]);
    const median = finite.length ? medianOf(finite) : 1;
    for (let cell = column; cell < grid.values.length; cell += columns) ratios[cell] = median === 0 ? 1 : grid.values[cell] / median;
  }
  return ratios;
}

// The median of each row over all columns, of values in the form of a grid's; NaN if a row has none.
export function rowMedians(values, { kinds, steps, ranks }) {
  const columns = steps.length;
  return ranks.map((_, row) => {
    const finite = [];
    for (let cell = row * columns; cell < (row + 1) * columns; cell += 1) if (kinds[cell] === KIND.FINITE) finite.push(values[cell]);
    return finite.length ? medianOf(finite) : NaN;
  });
}

export function medianOf(values) {
  const sorted = values.toSorted((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

// From the 1st to the 99th percentile, so that one extreme cell does not reduce the contrast of the rest.
export function robustRange(values, kinds) {
  const finite = sortedFinite(values, kinds);
  if (!finite.length) return [0, 1];
  const [low, high] = [at(finite, 0.01), at(finite, 0.99)];
  return high > low ? [low, high] : [low, low + (Math.abs(low) * 0.01 || 1)];
}

// From the median up to a value that usual noise hardly ever reaches: ranks with noise alone stay dark, and a rank that
// is a few percent slower all the time does not.
export function peerRange(ratios, kinds) {
  const finite = sortedFinite(ratios, kinds);
  if (!finite.length) return [1, 2];
  const sigma = (at(finite, 0.75) - at(finite, 0.25)) / 1.349; // of a normal distribution with these quartiles
  return [1, Math.max(1 + SIGMAS * Math.max(sigma, SIGMA_MIN), at(finite, 0.99))];
}

function sortedFinite(values, kinds) {
  return Float32Array.from(values).filter((_, cell) => kinds[cell] === KIND.FINITE).sort();
}

const at = (sorted, share) => sorted[Math.round((sorted.length - 1) * share)];
