// The fleet as /weft/fleet/events reports it. Rates are differences of the workers' counters.

import { events, headers, refusal } from "./sse.js";

const KEPT = 60; // snapshots, one per second
const WINDOW_MS = 2800; // Reports and snapshots arrive once per second each, not together.
const RETRY_MS = [500, 1000, 2000, 4000];
const SILENCE_MS = 15_000; // Snapshots arrive once per second.

export class Fleet {
  constructor() {
    this.hello = null;
    this.now = null; // the latest snapshot
    this.rates = new Map(); // worker id -> {prompt, generated} tokens per second, newest last
    this.reports = new Map(); // boot id -> its latest reports and their times
    this.threads = new Map(); // "prefill decode" -> {prompts, bytes, perSecond}
    this.found = { looked: 0, pool: 0, dram: 0, nvme: 0 };
    this.handOffsPerSecond = 0;
    this.bytesPerSecond = 0;
    this.seen = new Map(); // threads that this gateway already reported -> when
    this.at = 0;
  }

  take(picture) {
    const now = performance.now();
    const seconds = this.now ? Math.max((now - this.at) / 1000, 0.05) : 0;
    const old = new Map((this.now?.workers ?? []).map((worker) => [worker.boot, worker]));
    const moved = [];
    this.found = { looked: 0, pool: 0, dram: 0, nvme: 0 };
    let prompts = 0;
    let bytes = 0;
    for (const worker of picture.workers) {
      const before = old.get(worker.boot);
      this.#rate(worker, now);
      for (const [key, field] of [["looked", "looked_up_tokens"], ["pool", "pool_tokens"], ["dram", "dram_tokens"], ["nvme", "nvme_tokens"]]) {
        this.found[key] += worker.prefix[field];
      }
      for (const tally of worker.hand_offs) {
        const last = before?.hand_offs.find((each) => each.prefill_worker_id === tally.prefill_worker_id);
        const thread = this.#thread(tally.prefill_worker_id, worker.id);
        const grown = before ? tally.num_prompts - (last?.num_prompts ?? 0) : 0;
        const size = before ? tally.size_bytes - (last?.size_bytes ?? 0) : 0;
        thread.prompts = tally.num_prompts;
        prompts += grown;
        bytes += size;
        if (grown > 0) moved.push([tally.prefill_worker_id, worker.id]);
      }
    }
    this.handOffsPerSecond = this.#smooth(this.handOffsPerSecond, seconds ? prompts / seconds : 0);
    this.bytesPerSecond = this.#smooth(this.bytesPerSecond, seconds ? bytes / seconds : 0);
    const live = new Set(picture.workers.map((worker) => worker.id));
    for (const key of this.threads.keys()) if (!key.split(" ").every((id) => live.has(id))) this.threads.delete(key);
    for (const id of this.rates.keys()) if (!live.has(id)) this.rates.delete(id);
    const boots = new Set(picture.workers.map((worker) => worker.boot));
    for (const boot of this.reports.keys()) if (!boots.has(boot)) this.reports.delete(boot);
    this.now = picture;
    this.at = now;
    // Hand-offs through other gateways. Our own were reported when they happened.
    return moved.filter((pair) => now - (this.seen.get(pair.join(" ")) ?? -Infinity) > 3000);
  }

  handedOff({ prefill, decode }) {
    this.#thread(prefill, decode);
    this.seen.set(`${prefill} ${decode}`, performance.now());
  }

  rate(kind) {
    let sum = 0;
    for (const each of this.rates.values()) sum += each[kind].at(-1) ?? 0;
    return sum;
  }

  // Rates over the last few reports, by the time each was made.
  #rate(worker, now) {
    const reports = this.reports.get(worker.boot) ?? [];
    const made = now - worker.report_age_ms;
    if (!reports.length || made - reports.at(-1).made > 100) {
      reports.push({ made, prompt: worker.computed_prompt_tokens, generated: worker.generated_tokens });
    }
    while (reports.length > 2 && made - reports[1].made > WINDOW_MS) reports.shift();
    this.reports.set(worker.boot, reports);
    const [first, last] = [reports[0], reports.at(-1)];
    const series = this.rates.get(worker.id) ?? { prompt: [], generated: [] };
    this.rates.set(worker.id, series);
    for (const kind of ["prompt", "generated"]) {
      const rate = last === first ? 0 : ((last[kind] - first[kind]) * 1000) / (last.made - first.made);
      series[kind] = [...series[kind], rate].slice(-KEPT);
    }
  }

  #thread(prefill, decode) {
    const key = `${prefill} ${decode}`;
    if (!this.threads.has(key)) this.threads.set(key, { prefill, decode, prompts: 0 });
    return this.threads.get(key);
  }

  #smooth(old, fresh) {
    const mean = old * 0.7 + fresh * 0.3;
    return mean < 0.005 ? 0 : mean;
  }
}

// Runs for ever: connects, calls the handlers in `on`, reconnects. Connects at once when the key changes, and pauses
// while the page is hidden. `on` has hello, picture, handOff, lost, and refused (with whether the key is known).
export async function watch(fleet, on) {
  const key = document.getElementById("key");
  for (let tries = 0; ; tries += 1) {
    await visible();
    const call = new AbortController();
    const hide = () => { if (document.hidden) call.abort(); };
    document.addEventListener("visibilitychange", hide);
    let isOther = false;
    const changed = new Promise((resolve) => key.addEventListener("change", resolve, { once: true, signal: call.signal }));
    changed.then(() => { isOther = true; call.abort(); });
    try {
      // Do not pause here: the user may fetch the key from another tab.
      const status = await listen(fleet, on, call, () => { tries = 0; }).finally(() => document.removeEventListener("visibilitychange", hide));
      if (status) await changed;
      else on.lost("the gateway closed the connection");
    } catch (error) {
      if (!document.hidden && !isOther) on.lost(error.message);
    } finally {
      call.abort();
    }
    if (isOther) tries = -1;
    else if (!document.hidden) await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
  }
}

// Reads to the end of the stream. Returns the status if the key was refused. A silent stream counts as disconnected.
async function listen(fleet, on, call, heard) {
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => call.abort(new Error(`no event for ${SILENCE_MS / 1000} s`)), SILENCE_MS);
  };
  try {
    wait();
    const response = await fetch("/weft/fleet/events", { headers: headers(), signal: call.signal });
    if (response.status === 401 || response.status === 403) {
      on.refused(await refusal(response), response.status === 403);
      return response.status;
    }
    if (!response.ok) throw new Error(await refusal(response));
    for await (const { event, data } of events(response)) {
      wait();
      heard();
      const fields = JSON.parse(data);
      if (event === "hello") on.hello((fleet.hello = fields));
      if (event === "fleet") on.picture(fleet.take(fields));
      if (event === "hand_off") { fleet.handedOff(fields); on.handOff(fields); }
    }
    return 0;
  } finally {
    clearTimeout(timer);
  }
}

const visible = () => new Promise((resolve) => {
  if (!document.hidden) return resolve();
  const look = () => { if (!document.hidden) { document.removeEventListener("visibilitychange", look); resolve(); } };
  document.addEventListener("visibilitychange", look);
});
