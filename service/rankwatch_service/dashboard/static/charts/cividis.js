// The cividis colour map: reads the same with and without colour vision, and in grey.

const ANCHORS = [
  [0, 32, 76], [0, 42, 102], [0, 52, 110], [39, 63, 108], [60, 74, 107], [76, 85, 107], [91, 95, 109], [104, 106, 112],
  [117, 117, 117], [131, 129, 120], [146, 140, 120], [161, 152, 118], [176, 165, 114], [192, 178, 109], [209, 191, 102],
  [225, 204, 92], [243, 219, 79], [255, 233, 69],
];
const SHADES = 256;

// SHADES colours, each as one 32-bit little-endian RGBA, as ImageData has them.
export const palette = Uint32Array.from({ length: SHADES }, (_, shade) => {
  const [r, g, b] = at(shade / (SHADES - 1));
  return packed(r, g, b);
});

export function packed(r, g, b) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export function css(share) {
  return `rgb(${at(share).join(" ")})`;
}

function at(share) {
  const place = Math.min(1, Math.max(0, share)) * (ANCHORS.length - 1);
  const low = Math.min(Math.floor(place), ANCHORS.length - 2);
  return ANCHORS[low].map((from, n) => Math.round(from + (ANCHORS[low + 1][n] - from) * (place - low)));
}
