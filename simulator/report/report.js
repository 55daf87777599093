"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const off = { gpu: new Set(), series: new Set() };

  // A switch hides everything of its GPU or algorithm: table rows, figures, and the series inside figures.
  const show = () => {
    for (const kind of Object.keys(off)) {
      const key = kind === "gpu" ? "gpu" : "series";
      for (const element of all(`[data-${key}]`)) {
        const name = element.dataset[key].split(":")[0];
        element.classList.toggle("off-" + kind, off[kind].has(element.dataset[key]) || off[kind].has(name));
      }
    }
    for (const element of all("[data-gpu], [data-series]")) {
      element.classList.toggle("off", element.classList.contains("off-gpu") || element.classList.contains("off-series"));
    }
  };
  for (const box of all("input[data-switch]")) {
    box.addEventListener("change", () => {
      off[box.dataset.switch][box.checked ? "delete" : "add"](box.value);
      show();
    });
  }

  // A click on a heading sorts; each row takes the row of its launches along.
  const table = document.getElementById("comparison");
  const body = table.tBodies[0];
  const value = (row, column, kind) => {
    const cell = row.cells[Math.min(column, row.cells.length - 1)];
    const text = cell.dataset.value ?? cell.textContent;
    return kind === "number" ? (text === "" ? NaN : Number(text)) : text;
  };
  all("th", table.tHead).forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      all("th", table.tHead).forEach(other => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const kind = heading.dataset.kind;
      const rows = all("tr.entry", body).map(row => ({ row, key: value(row, column, kind), detail: row.nextElementSibling }));
      rows.sort((a, b) => {
        if (kind === "number") {
          if (Number.isNaN(a.key) || Number.isNaN(b.key)) return Number.isNaN(a.key) - Number.isNaN(b.key);
          return up ? a.key - b.key : b.key - a.key;
        }
        return (up ? 1 : -1) * a.key.localeCompare(b.key);
      });
      for (const { row, detail } of rows) {
        body.append(row);
        if (detail && detail.classList.contains("detail")) body.append(detail);
      }
    });
  });

  // A click on a row opens its launches.
  for (const row of all("tr.entry[tabindex]", body)) {
    const toggle = () => {
      const detail = row.nextElementSibling;
      detail.hidden = !detail.hidden;
      row.setAttribute("aria-expanded", String(!detail.hidden));
    };
    row.addEventListener("click", toggle);
    row.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); }
    });
  }

  // The search box keeps the profile values whose row contains every word.
  const search = document.getElementById("search");
  if (search) {
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of all("tr.value")) {
        const text = row.textContent.toLowerCase();
        row.classList.toggle("off", !words.every(word => text.includes(word)));
      }
    });
  }
})();
