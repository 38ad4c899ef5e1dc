// Light or dark theme: the choice of the user, else of the system. Loaded first, so that pages do not flash.

const KEY = "rankwatch.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be blocked; then use the system's preference
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
    // Not stored; the choice lasts for this page.
  }
  document.documentElement.dataset.theme = next;
  dispatchEvent(new Event("themechange"));
}

dark.addEventListener("change", apply);
apply();
