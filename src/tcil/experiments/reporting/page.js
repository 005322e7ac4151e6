"use strict";
(() => {
  const reduced = (values) => values.join(" ");
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };

  // What is said below the pointer ---------------------------------------------------------------------------
  const box = make("div", undefined, "tip");
  box.hidden = true;
  document.body.append(box);
  const place = (event) => {
    const point = event.touches && event.touches.length ? event.touches[0] : event;
    const { width, height } = box.getBoundingClientRect();
    const room = { x: document.documentElement.clientWidth, y: window.innerHeight };
    const left = point.clientX + 16 + width > room.x ? point.clientX - 16 - width : point.clientX + 16;
    box.style.left = Math.max(4, Math.min(left, room.x - width - 4)) + "px";
    box.style.top = Math.max(4, Math.min(point.clientY + 16, room.y - height - 4)) + "px";
  };
  const binned = (row) => ({
    title: `Confidence ${row.from.toFixed(1)} to ${row.to.toFixed(1)}`,
    rows: [
      [null, null, "confidence", row.confidence.toFixed(3)],
      [null, null, "accuracy", row.accuracy.toFixed(3)],
      [null, null, "images", `${row.count} (${row.share.toFixed(1)} %)`],
    ],
  });
  const teller = (state) => (handler, event, item, datum) => {
    const tip = datum && (datum.tip || (datum.confidence !== undefined ? binned(datum) : null));
    const rows = tip
      ? tip.rows.filter(([key, group]) =>
          (key === null || state.shown.includes(key)) && (group === null || group === state.values.group))
      : [];
    if (!rows.length) {
      box.hidden = true;
      return;
    }
    const table = make("table");
    for (const [, , name, value] of rows) {
      const line = make("tr");
      line.append(make("td", name), make("td", value));
      table.append(line);
    }
    box.replaceChildren(make("p", tip.title), table);
    box.hidden = false;
    place(event);
  };
  window.addEventListener("scroll", () => { box.hidden = true; }, { passive: true });

  // Charts ---------------------------------------------------------------------------------------------------
  const unpacked = (datasets) => Object.fromEntries(Object.entries(datasets).map(([name, { fields, rows }]) => [
    name,
    rows.map((row) => Object.fromEntries(fields.map((field, at) => [field, row[at]]).filter(([, v]) => v !== null))),
  ]));

  const start = async (figure) => {
    const content = JSON.parse(figure.querySelector("script.data").textContent);
    const config = JSON.parse(document.getElementById("chart-config").textContent);
    const panels = [...figure.querySelectorAll(".panel")];
    const views = new Map();
    const values = Object.fromEntries(content.spec.params.map(({ name, value }) => [name, value]));
    const state = { shown: values.shown, values };

    const draw = async (panel, at) => {
      const { datasets, key } = content.panels[at];
      panel.hidden = key !== null && !state.shown.includes(key);
      const told = panel.querySelector(".told");
      if (told) told.textContent = content.panels[at].told[reduced(content.controls.map((n) => values[n]))] ?? "no images";
      if (panel.hidden) return;
      let view = views.get(panel);
      if (!view) {
        const live = panel.querySelector(".live");
        const room = live.clientWidth || panel.clientWidth;
        const params = content.spec.params.map((param) => ({ ...param, value: values[param.name] ?? param.value }));
        const spec = { ...structuredClone(content.spec), params, datasets: unpacked(datasets) };
        if (!content.fixed) spec.width = room;
        const plain = { mode: "vega-lite", actions: false, renderer: "svg", defaultStyle: false, logLevel: 1 };
        const options = { ...plain, ast: true, config, tooltip: teller(state) }; // ast: nothing is evaluated as code
        view = (await vegaEmbed(live.querySelector(".view"), spec, options)).view;
        views.set(panel, view);
        panel.dataset.live = "true";
        if (!content.fixed) {
          let last = room;
          new ResizeObserver(() => {
            if (live.clientWidth && live.clientWidth !== last) view.width((last = live.clientWidth)).runAsync();
          }).observe(live);
        }
      }
      for (const name of ["shown", ...content.controls]) view.signal(name, values[name]);
      await view.runAsync();
    };
    const redraw = () => Promise.all(panels.map(draw));

    // The picture as a file of its own: as it is chosen, on white, with its legend inside.
    const save = async () => {
      const params = content.spec.params.map((param) => ({ ...param, value: values[param.name] ?? param.value }));
      const spec = { ...structuredClone(content.spec), params, datasets: unpacked(content.panels[0].datasets) };
      for (const { encoding } of spec.layer) {
        for (const channel of ["color", "shape"].filter((name) => encoding[name] && encoding[name].field === "key")) {
          encoding[channel].legend = { title: null, orient: "bottom", values: state.shown };
        }
      }
      const options = { mode: "vega-lite", actions: false, ast: true, defaultStyle: false, logLevel: 1 };
      const host = make("div");
      const { view, finalize } = await vegaEmbed(host, spec, { ...options, config: { ...config, background: "white" } });
      const link = make("a");
      link.href = URL.createObjectURL(new Blob([await view.toSVG()], { type: "image/svg+xml" }));
      link.download = "figure.svg";
      link.click();
      setTimeout(() => { URL.revokeObjectURL(link.href); finalize(); }, 1000);
    };
    figure.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => save()));

    figure.querySelectorAll("input[data-key]").forEach((input) => input.addEventListener("change", () => {
      values.shown = [...figure.querySelectorAll("input[data-key]:checked")].map((one) => one.dataset.key);
      state.shown = values.shown;
      redraw();
    }));
    figure.querySelectorAll("input[data-control]").forEach((input) => input.addEventListener("input", () => {
      const slider = input.type === "range";
      values[input.dataset.control] = slider ? Number(input.value) : input.value;
      if (slider) input.parentElement.querySelector("output").textContent = input.value;
      redraw();
    }));
    figure.querySelectorAll("[data-all]").forEach((button) => button.addEventListener("click", () => {
      const on = button.dataset.all === "on";
      figure.querySelectorAll("input[data-key]").forEach((input) => { input.checked = on; });
      figure.querySelector("input[data-key]").dispatchEvent(new Event("change"));
    }));
    await redraw();
    figure.dataset.live = "true";
  };

  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    watcher.unobserve(entry.target);
    start(entry.target).catch((error) => console.error(error));
  }), { rootMargin: "600px" });
  document.querySelectorAll("figure.chart").forEach((figure) => watcher.observe(figure));

  // Tables: a click on the head of a column sorts each block by it ---------------------------------------------
  const numbers = (cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value));
  const compare = (a, b) => {
    const [x, y] = [numbers(a), numbers(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    if (Number.isNaN(x) !== Number.isNaN(y)) return null; // what has no number stays last
    return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  };
  document.querySelectorAll("table:not(.wordy):not(.plain)").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = make("button", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        for (const body of table.tBodies) {
          const rows = [...body.rows].filter((row) => !row.classList.contains("heading"));
          rows.sort((a, b) => {
            const order = compare(a.cells[column], b.cells[column]);
            if (order === null) return Number.isNaN(numbers(a.cells[column])) ? 1 : -1;
            return down ? -order : order;
          });
          body.append(...rows);
        }
      });
    });
  });

  // Print: what is folded away belongs to it -------------------------------------------------------------------
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((part) => { part.open = true; });
  });
  window.addEventListener("afterprint", () => folded.forEach((part) => { part.open = false; }));
  document.documentElement.classList.add("scripted");
})();
