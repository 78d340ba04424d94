// Light or dark: what stands behind an element, and when that changes.

// The theme that fits the page around `node`: what its background is, else what the reader prefers.
function detectTheme(node) {
  for (let at = node.parentElement; at; at = at.parentElement) {
    const parts = getComputedStyle(at).backgroundColor.match(/[\d.]+/g)?.map(Number);
    if (parts && (parts.length < 4 || parts[3] > 0.5)) return 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] < 128 ? "dark" : "light";
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function onThemeChange(act) {
  const observer = new MutationObserver(act);
  for (const node of [document.documentElement, document.body]) observer.observe(node, { attributes: true });
  return observer;
}
