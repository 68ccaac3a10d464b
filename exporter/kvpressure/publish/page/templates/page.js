"use strict";
/* Refreshes the page in place. Without it the page is the same, only not by itself. */
(() => {
  const EVERY = 5000;
  const status = document.getElementById("refresh");
  const button = document.getElementById("pause");
  let paused = false;
  let timer = 0;

  const say = (text, bad) => {
    if (status.textContent !== text) { status.textContent = text; }
    status.className = bad ? "lost" : "";
  };

  /* What the reader opened or closed stays so; every details has an id that survives the refresh. */
  const replace = (fresh) => {
    const open = new Map([...document.querySelectorAll("main details[id]")].map((one) => [one.id, one.open]));
    const focused = document.activeElement && document.activeElement.closest("main [id]");
    const focus = focused ? focused.id : "";
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.querySelector("#headline").replaceWith(fresh.querySelector("#headline"));
    document.title = fresh.title;
    for (const one of document.querySelectorAll("main details[id]")) {
      if (open.has(one.id)) { one.open = open.get(one.id); }
    }
    const again = focus && document.getElementById(focus);
    if (again) { (again.matches("details") ? again.querySelector("summary") : again).focus({preventScroll: true}); }
  };

  const selecting = () => {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed;
  };

  const refresh = async () => {
    if (!document.hidden && !selecting()) {
      try {
        const answer = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(EVERY)});
        if (!answer.ok) { throw new Error("status " + answer.status); }
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (fresh.querySelector("main") === null) { throw new Error("not this page"); }
        if (!paused && !selecting()) { replace(fresh); }
        say("Refreshes every " + EVERY / 1000 + " s.", false);
      } catch (error) {
        say("The exporter does not answer (" + error.message + "). What you see is old.", true);
      }
    }
    if (!paused) { timer = setTimeout(refresh, EVERY); }
  };

  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    clearTimeout(timer);
    button.textContent = paused ? "Resume" : "Pause";
    if (paused) { say("Paused.", false); } else { refresh(); }
  });
  say("Refreshes every " + EVERY / 1000 + " s.", false);
  timer = setTimeout(refresh, EVERY);
})();
