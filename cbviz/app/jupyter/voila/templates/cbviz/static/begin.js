// Progress while Voilà runs the notebook, and the cells once all is there. Voilà's own template has this as scripts inside the page.
// @ts-check
(() => {
  /** @type {any} */
  const page = window;

  /** Shows the cells: called by Voilà when the theme is there, and by us when the whole page is. Whoever comes last does it. */
  page.display_cells = () => {
    if (!page.themeLoaded) {
      page.cellLoaded = true;
      return;
    }
    document.getElementById("loading")?.remove();
    const cells = document.getElementById("rendered_cells");
    if (cells) cells.style.display = "";
  };
  page.voila_finish = page.display_cells;

  // The page comes cell by cell, each when the one before it has run.
  const progress = new MutationObserver(() => {
    const begun = document.querySelectorAll("[data-cell]");
    const text = document.getElementById("loading_text");
    const last = begun[begun.length - 1];
    const words = last
      ? `Running cell ${last.getAttribute("data-cell")} of ${last.getAttribute("data-cells")} …`
      : "";
    if (text && words && text.textContent !== words) text.textContent = words; // writing it is a change too: only where it differs
  });
  progress.observe(document.documentElement, { childList: true, subtree: true });
  document.addEventListener("DOMContentLoaded", () => {
    progress.disconnect();
    page.display_cells();
  });
})();
