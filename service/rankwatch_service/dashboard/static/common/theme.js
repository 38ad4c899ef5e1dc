// Light or dark: what the reader chose, else what the system prefers. Loaded first so that pages do not flash.

const KEY = "rankwatch.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden; then the system's preference holds
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen() ?? (dark.matches ? "dark" : "light");
  dispatchEvent(new Event("themechange"));
}

export function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // Not kept; it still holds for this page.
  }
  document.documentElement.dataset.theme = next;
  dispatchEvent(new Event("themechange"));
}

dark.addEventListener("change", apply);
apply();
