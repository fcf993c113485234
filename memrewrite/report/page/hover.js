"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector(".points").textContent);
  const canvas = chart.querySelector(".canvas");
  const guide = chart.querySelector(".guide");
  const readout = chart.querySelector(".readout");
  const size = (bytes) => {
    for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (bytes >= unit) return (bytes / unit).toFixed(unit >= 1e9 ? 2 : 1) + " " + name;
    }
    return bytes + " B";
  };
  const before = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle - 1;
    }
    return low;
  };
  let at = null;
  const show = (x) => {
    at = Math.max(0, Math.min(data.width, x));
    guide.hidden = false;
    guide.style.left = (100 * at / data.width) + "%";
    const phase = data.phases.findLast((each) => each.start <= at) || data.phases[0];
    readout.replaceChildren(...data.curves.map((curve) => {
      const i = before(curve.x, at);
      const [module, operator] = curve.makers[curve.by[i]];
      const line = document.createElement("p");
      const name = document.createElement("b");
      const made = document.createElement("span");
      name.textContent = curve.name;
      const kinds = curve.kinds.filter(([, sizes]) => sizes[i] > 0);
      made.textContent = kinds.map(([kind, sizes]) => kind + " " + size(sizes[i])).join(", ");
      line.append(name, " " + size(curve.total[i]) + " in " + phase.name + " at " + module + " · " + operator, made);
      return line;
    }));
  };
  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    show(Math.round(data.width * (event.clientX - box.left) / box.width));
  };
  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("pointerdown", follow);
  chart.querySelector(".plot").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const xs = data.curves[data.curves.length - 1].x;
    const i = at === null ? -1 : before(xs, at);
    let next = i + move;
    while (next > 0 && next < xs.length - 1 && xs[next] === xs[i]) next += move;
    show(xs[Math.max(0, Math.min(xs.length - 1, next))]);
  });
}
