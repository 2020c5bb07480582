// The playground: sends one prompt to every method that is switched on and draws what streams back.
// Text of a model enters the page as textContent only; drawing happens once per animation frame.

const LABELS = { plain: "Plain", eagle3: "EAGLE-3", peagle: "P-EAGLE", ngram: "Prompt lookup" };
const ONLY_PLAIN = { default: "plain", proposers: [{ name: "plain", num_speculative_tokens: 0 }] };
const GHOST_MS = 900; // how long refused drafts stay
const GHOST_HOLD_MS = 150; // the least time before newer ones replace them
const NUMBERS_MS = 120; // between two updates of numbers and charts
const NONE = "–";

const $ = (id) => document.getElementById(id);
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** An error whose message is meant for the reader of the page. */
class Problem extends Error {}

// ---- the wire -------------------------------------------------------------------------------

/** The data of each event of a server-sent stream; its bytes may be cut anywhere. */
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      buffer += decoder.decode(value, { stream: !done });
      // A \r at the very end may be the first half of \r\n.
      const lines = buffer.split(/\r\n|\n|\r(?!$)/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line !== "") continue;
        if (data.length) yield data.join("\n");
        data = [];
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** [text, is a draft] of each token of a chunk. The chunk's text rules: a stop string, say, can
 * hold back or drop the text of tokens. */
export function alignTokens(text, tokens) {
  const parts = [];
  let end = 0;
  for (const [piece, drafted] of tokens) {
    const start = piece ? text.indexOf(piece, end) : -1;
    if (start < 0) continue;
    if (start > end) parts.push([text.slice(end, start), false]);
    parts.push([piece, drafted]);
    end = start + piece.length;
  }
  if (end < text.length) parts.push([text.slice(end), false]);
  return parts;
}

/** What a refused request says, in plain words. */
async function refusal(response) {
  const wait = response.headers.get("Retry-After");
  const again = wait ? ` Try again in ${wait} s.` : "";
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  return new Problem(message + again);
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  return response.body;
}

function explain(error, hasBegun) {
  if (error instanceof Problem) return error.message;
  if (error instanceof SyntaxError) return "The server sent something that this page does not understand.";
  if (hasBegun) return "The connection to the server was lost before the answer was complete.";
  return "The server cannot be reached.";
}

// ---- measuring ------------------------------------------------------------------------------

/** Counts of one answer. Times are in seconds since its request. */
export class Meter {
  constructor(depth) {
    Object.assign(this, { points: [], tokens: 0, drafts: 0, drafted: 0, accepted: 0 });
    this.perPosition = Array(depth).fill(0);
  }

  /** `time`: of a chunk with `count` tokens; speculation: what the server reports of its step. */
  step(time, count, speculation) {
    this.tokens += count;
    const last = this.points.at(-1);
    // What one read of the network brought counts as one arrival.
    if (last && time - last[0] < 0.001) last[1] = this.tokens;
    else this.points.push([time, this.tokens]);
    if (!speculation?.num_drafted) return;
    this.drafts += 1;
    this.drafted += speculation.num_drafted;
    this.accepted += speculation.num_accepted;
    for (let i = 0; i < speculation.num_accepted; i++) this.perPosition[i] = (this.perPosition[i] ?? 0) + 1;
  }

  /** The server's own totals: they also know of steps that gave no text. */
  finish(usage) {
    this.tokens = usage.completion_tokens ?? this.tokens;
    const totals = usage.speculation;
    if (!totals) return;
    this.drafts = totals.num_drafts;
    this.drafted = totals.num_draft_tokens;
    this.accepted = totals.num_accepted_tokens;
    totals.num_accepted_tokens_per_pos.forEach((count, i) => (this.perPosition[i] = count));
  }

  get firstToken() {
    return this.points[0]?.[0] ?? null;
  }

  get seconds() {
    return this.points.at(-1)?.[0] ?? 0;
  }

  /** Tokens per second after the first chunk, or of all of them where they came at once. */
  get rate() {
    if (!this.points.length) return null;
    const [start, already] = this.points[0];
    const [end, total] = this.points.at(-1);
    return end > start ? (total - already) / (end - start) : end > 0 ? total / end : null;
  }

  get acceptanceLength() {
    return this.drafts ? 1 + this.accepted / this.drafts : null;
  }

  get acceptance() {
    return this.perPosition.map((count) => (this.drafts ? count / this.drafts : 0));
  }

  /** Points [time, tokens/s] of the curve: over a trailing window, which at the start grows. */
  curve() {
    const { points } = this;
    if (points.length < 2 || this.seconds <= points[0][0]) return [];
    const start = points[0][0];
    const span = this.seconds - start;
    const longest = Math.min(span, Math.max(0.2, span / 6));
    const tokensAt = (time) => {
      let [low, high] = [0, points.length - 1];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (points[middle][0] <= time) low = middle;
        else high = middle - 1;
      }
      const [[t0, n0], next] = [points[low], points[low + 1]];
      return next && time > t0 ? n0 + ((time - t0) / (next[0] - t0)) * (next[1] - n0) : n0;
    };
    const first = longest / 2;
    return Array.from({ length: 81 }, (_, i) => {
      const time = start + first + ((span - first) * i) / 80;
      const window = Math.min(longest, time - start);
      return [time, (tokensAt(time) - tokensAt(time - window)) / window];
    });
  }
}

// ---- drawing --------------------------------------------------------------------------------

function element(name, className, text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

function shape(name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

/** Empties `svg` and sets its coordinates to the pixels that it has: [width, height]. */
function canvas(svg) {
  const box = svg.getBoundingClientRect();
  const size = [Math.max(box.width, 120), box.height || 100];
  svg.setAttribute("viewBox", `0 0 ${size[0]} ${size[1]}`);
  svg.replaceChildren();
  return size;
}

const fixed = (value, digits, unit = "") => (value === null ? NONE : value.toFixed(digits) + unit);
const speed = (rate) => fixed(rate, rate !== null && rate >= 100 ? 0 : 1);
const percent = (share) => `${Math.round(share * 100)}%`;

/** A round step that divides `range` into at most `count` parts. */
function tickStep(range, count) {
  const power = 10 ** Math.floor(Math.log10(range / count));
  return power * [1, 2, 5, 10].find((factor) => factor * power * count >= range * (1 - 1e-9));
}

function drawPositions(svg, shares, isMeasured) {
  const [width, height] = canvas(svg);
  const [top, bottom] = [18, 20];
  const slot = width / shares.length;
  const bar = Math.min(slot * 0.7, 44);
  shares.forEach((share, i) => {
    const middle = slot * (i + 0.5);
    const rise = (height - top - bottom) * share;
    const at = { x: middle - bar / 2, width: bar, rx: 3 };
    svg.append(
      shape("rect", { class: "track", y: top, height: height - top - bottom, ...at }),
      shape("rect", { class: "bar", y: height - bottom - rise, height: rise, ...at }),
      shape("text", { x: middle, y: height - 4, "text-anchor": "middle" }, i + 1),
    );
    const label = { x: middle, y: top - 5, "text-anchor": "middle", class: "strong" };
    if (isMeasured && slot >= 30) svg.append(shape("text", label, percent(share)));
  });
}

function drawSpeeds(svg, columns) {
  const [width, height] = canvas(svg);
  const curves = columns.map((column) => [column, column.meter.curve()]);
  const points = curves.flatMap(([, curve]) => curve);
  const box = { left: 40, right: width - 8, top: 12, bottom: height - 38 };
  const step = tickStep(Math.max(10, ...points.map((point) => point[1])), 4);
  const peak = Math.ceil(Math.max(10, ...points.map((point) => point[1])) / step - 1e-9) * step;
  const seconds = Math.max(...columns.map((column) => column.meter.seconds), 0) || 1;
  const x = (time) => box.left + ((box.right - box.left) * time) / seconds;
  const y = (rate) => box.bottom - ((box.bottom - box.top) * rate) / peak;
  if (!points.length) {
    const middle = { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" };
    svg.append(shape("text", middle, "Nothing measured yet"));
  }
  for (let rate = 0; rate <= peak; rate += step) {
    const line = { x1: box.left, x2: box.right, y1: y(rate), y2: y(rate), class: rate ? "grid" : "base" };
    svg.append(shape("line", line));
    svg.append(shape("text", { x: box.left - 8, y: y(rate) + 4, "text-anchor": "end" }, +rate.toFixed(1)));
  }
  const tick = tickStep(seconds, width < 400 ? 4 : 8);
  for (let time = 0; time <= seconds * 1.0001; time += tick) {
    svg.append(shape("text", { x: x(time), y: box.bottom + 18, "text-anchor": "middle" }, +time.toFixed(3)));
  }
  const caption = { x: box.right, y: height - 3, "text-anchor": "end" };
  svg.append(shape("text", caption, "seconds since each request"));
  for (const [column, curve] of curves) {
    if (!curve.length) continue;
    const path = curve.map(([time, rate]) => `${x(time).toFixed(1)},${y(rate).toFixed(1)}`).join(" ");
    svg.append(shape("polyline", { class: `curve ${column.series}`, points: path }));
  }
}

function drawSpeedups(svg, columns) {
  svg.style.height = `${columns.length * 60 + 32}px`;
  const [width, height] = canvas(svg);
  const largest = Math.max(1, ...columns.map((column) => column.speedup ?? 0));
  const scale = (width - 56) / largest;
  const row = 60;
  columns.forEach((column, i) => {
    const y = 10 + row * i;
    const length = (column.speedup ?? 0) * scale;
    const bar = { x: 0, y: y + 18, height: row - 34, rx: 3 };
    svg.append(
      shape("text", { x: 0, y: y + 12 }, column.label),
      shape("rect", { class: "track", width: width - 56, ...bar }),
      shape("rect", { class: `bar ${column.series}`, width: length, ...bar }),
    );
    const label = { x: width, y: bar.y + bar.height / 2 + 4, "text-anchor": "end", class: "strong" };
    svg.append(shape("text", label, fixed(column.speedup, 2, "×")));
  });
  if (!columns.some((column) => column.proposer.name === "plain")) {
    svg.append(shape("text", { x: 0, y: height - 3 }, "Run plain decoding too: it is the measure."));
  }
  const line = { x1: scale, x2: scale, y1: 10, y2: 10 + row * columns.length, class: "reference" };
  if (columns.some((column) => column.speedup !== null)) svg.append(shape("line", line));
}

// ---- a column -------------------------------------------------------------------------------

/** One method: its switch, numbers, answer and chart. */
class Column {
  constructor(proposer, series) {
    this.proposer = proposer;
    this.series = series;
    this.label = LABELS[proposer.name] ?? proposer.name;
    this.depth = proposer.num_speculative_tokens;
    this.speedup = null;
    this.node = $("column-template").content.firstElementChild.cloneNode(true);
    this.node.classList.add(series);
    this.node.dataset.proposer = proposer.name;
    this.node.setAttribute("aria-label", this.label);
    this.find(".name").textContent = this.label;
    this.output = this.find(".output");
    this.output.setAttribute("aria-label", `Answer of ${this.label}`);
    this.find(".on").addEventListener("change", () => {
      this.node.classList.toggle("off", !this.isOn);
      drawSoon();
    });
    this.clear(this.depth);
  }

  find(selector) {
    return this.node.querySelector(selector);
  }

  get isOn() {
    return this.find(".on").checked;
  }

  clear(depth) {
    this.meter = new Meter(depth);
    this.pending = []; // parts that are not drawn yet
    this.refused = null; // drafts of the last step that are not drawn yet
    this.finishReason = null;
    this.output.replaceChildren();
    this.ghosts = null;
    this.find(".problem").hidden = true;
    this.find(".positions").hidden = depth === 0;
    this.setState("");
  }

  setState(text, isRunning = false) {
    this.find(".state").textContent = text;
    this.node.classList.toggle("running", isRunning);
  }

  /** Ask and read to the end; never throws. Returns "done", "stopped" or "failed". */
  async run(settings, signal) {
    this.startedAt = performance.now();
    this.setState("running", true);
    let [hasBegun, isComplete] = [false, false];
    try {
      const events = readEvents(await post(settings.path, settings.body(this), signal));
      hasBegun = true;
      for await (const data of events) {
        // Read on after [DONE], to the end: the browser then keeps the connection.
        if (data === "[DONE]") isComplete = true;
        else this.take(JSON.parse(data));
      }
      if (!isComplete && !this.finishReason) throw new TypeError("the stream ended early");
      this.setState(this.finishReason === "length" ? "reached max tokens" : "finished");
      return "done";
    } catch (error) {
      const isStopped = signal.aborted;
      this.setState(isStopped ? "stopped" : "failed");
      if (isStopped) return "stopped";
      this.find(".problem").textContent = explain(error, hasBegun);
      this.find(".problem").hidden = false;
      return "failed";
    } finally {
      drawSoon(true);
    }
  }

  take(chunk) {
    if (chunk.error) throw new Problem(chunk.error.message ?? "The server failed while it answered.");
    const choice = chunk.choices?.[0];
    const text = choice?.text ?? (choice?.delta?.reasoning_content ?? "") + (choice?.delta?.content ?? "");
    const { speculation } = chunk;
    const tokens = speculation?.tokens ?? (text ? [[text, false]] : []);
    const seconds = (performance.now() - this.startedAt) / 1000;
    if (tokens.length) this.meter.step(seconds, tokens.length, speculation);
    this.pending.push(...alignTokens(text, tokens));
    if (speculation) this.refused = speculation.rejected ?? [];
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.usage) this.meter.finish(chunk.usage);
    drawSoon();
  }

  drawTokens(now) {
    const isGhostDue = this.refused && now - (this.ghostsAt ?? 0) >= GHOST_HOLD_MS;
    if (!this.pending.length && !isGhostDue) return;
    const { output } = this;
    const isFollowing = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    const tokens = this.pending.map(([text, drafted]) => element("span", drafted ? "token draft" : "token", text));
    this.pending = [];
    if (this.ghosts?.isConnected) this.ghosts.before(...tokens);
    else output.append(...tokens);
    if (isGhostDue) this.drawGhosts(now);
    if (isFollowing) output.scrollTop = output.scrollHeight;
  }

  /** The refused drafts stand at the end of the text, fade and go. */
  drawGhosts(now) {
    this.ghosts?.remove();
    const refused = this.refused;
    this.refused = null;
    if (!refused.length || reducedMotion.matches) return;
    const ghosts = element("span", "ghosts");
    ghosts.setAttribute("aria-hidden", "true");
    ghosts.append(...refused.map((text) => element("s", "refused", text.replaceAll("\n", "⏎"))));
    this.output.append(ghosts);
    [this.ghosts, this.ghostsAt] = [ghosts, now];
    setTimeout(() => ghosts.classList.add("fading"), GHOST_MS - 400);
    setTimeout(() => ghosts.remove(), GHOST_MS);
  }

  drawNumbers(baseline) {
    const { meter } = this;
    this.speedup = baseline && meter.rate ? meter.rate / baseline : null;
    const stats = { rate: speed(meter.rate), speedup: fixed(this.speedup, 2, "×") };
    stats.acceptance = fixed(meter.acceptanceLength, 2);
    stats.first = meter.firstToken === null ? NONE : `${Math.round(meter.firstToken * 1000)} ms`;
    for (const [name, text] of Object.entries(stats)) this.find(`[data-stat=${name}]`).textContent = text;
    const drafts = meter.drafts ? ` · ${meter.accepted} of ${meter.drafted} draft tokens accepted` : "";
    const counts = `${meter.tokens} tokens in ${meter.seconds.toFixed(2)} s${drafts}`;
    this.find(".counts").textContent = meter.tokens ? counts : "";
    if (!this.isOn || !meter.perPosition.length) return;
    drawPositions(this.find(".positions svg"), meter.acceptance, meter.drafts > 0);
    const row = (share, i) => {
      const line = element("tr");
      line.append(element("td", "", i + 1), element("td", "", percent(share)));
      return line;
    };
    this.find("tbody").replaceChildren(...meter.acceptance.map(row));
  }
}

// ---- the page -------------------------------------------------------------------------------

let model = null;
let columns = [];
let running = null; // the AbortController of the run
let frame = 0;
let numbersAt = -Infinity;

/** Draw in the next frame; numbers and charts only every NUMBERS_MS, or at once. */
function drawSoon(atOnce = false) {
  if (atOnce) numbersAt = -Infinity;
  frame ||= requestAnimationFrame(draw);
}

function draw(now) {
  frame = 0;
  for (const column of columns) column.drawTokens(now);
  if (now - numbersAt >= NUMBERS_MS) drawNumbers(now);
  if (running || columns.some((column) => column.refused)) drawSoon();
}

function drawNumbers(now) {
  numbersAt = now;
  const shown = columns.filter((column) => column.isOn);
  const baseline = shown.find((column) => column.proposer.name === "plain")?.meter.rate;
  for (const column of columns) column.drawNumbers(baseline);
  drawSpeeds($("speed-chart"), shown);
  drawSpeedups($("speedup-chart"), shown);
  $("results").tBodies[0].replaceChildren(...shown.map(resultRow));
}

function resultRow(column) {
  const row = element("tr");
  const swatch = shape("svg", { class: "chart", viewBox: "0 0 28 10", "aria-hidden": "true" });
  swatch.append(shape("polyline", { class: `curve ${column.series}`, points: "1,5 27,5" }));
  const head = element("th");
  head.scope = "row";
  head.append(swatch, column.label);
  const { meter } = column;
  const cells = [speed(meter.rate), fixed(column.speedup, 2, "×"), fixed(meter.acceptanceLength, 2)];
  row.append(head, ...cells.map((text) => element("td", "", text)));
  return row;
}

/** The form's values as what to send where. */
function readSettings() {
  const prompt = $("prompt").value;
  const isChat = $("chat").checked;
  const common = { model: model.id, stream: true, stream_options: { include_usage: true } };
  common.temperature = $("temperature").valueAsNumber;
  common.max_tokens = $("max-tokens").valueAsNumber;
  if ($("seed").value !== "") common.seed = $("seed").valueAsNumber;
  const input = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const depth = (column) => Math.min(column.depth, $("depth").valueAsNumber);
  const speculation = (column) => {
    return { proposer: column.proposer.name, num_speculative_tokens: depth(column), report: true };
  };
  return {
    path: isChat ? "/v1/chat/completions" : "/v1/completions",
    shownPrompt: isChat ? "" : prompt,
    depth,
    body: (column) => ({ ...common, ...input, speculation: speculation(column) }),
  };
}

async function run() {
  if (running || !model || !$("form").reportValidity()) return;
  const chosen = columns.filter((column) => column.isOn);
  if (!chosen.length) return void ($("summary").textContent = "Switch on at least one method below.");
  const settings = readSettings();
  const controller = new AbortController();
  setRunning(controller);
  for (const column of columns) {
    column.clear(settings.depth(column));
    if (!column.isOn) continue;
    column.setState("waiting");
    if (settings.shownPrompt) column.output.append(element("span", "prompt", settings.shownPrompt));
  }
  drawSoon(true);
  const ask = (column) => column.run(settings, controller.signal);
  const outcomes = [];
  if ($("form").elements.order.value === "together") {
    $("summary").textContent = "Running together: the methods share the machine.";
    outcomes.push(...(await Promise.all(chosen.map(ask))));
  } else {
    for (const [i, column] of chosen.entries()) {
      if (controller.signal.aborted || !column.isOn) {
        column.setState("stopped");
        outcomes.push("stopped");
        continue;
      }
      $("summary").textContent = `Running ${column.label} (${i + 1} of ${chosen.length}).`;
      outcomes.push(await ask(column));
    }
  }
  setRunning(null);
  drawNumbers(performance.now());
  $("summary").textContent = summarize(chosen, outcomes);
}

function summarize(chosen, outcomes) {
  const sentences = chosen.map((column, i) => {
    if (outcomes[i] !== "done") return `${column.label} ${outcomes[i]}.`;
    const isCompared = column.speedup && column.proposer.name !== "plain";
    const times = isCompared ? `, ${column.speedup.toFixed(2)} times plain` : "";
    return `${column.label}: ${speed(column.meter.rate)} tokens/s${times}.`;
  });
  return sentences.join(" ");
}

function setRunning(controller) {
  const [from, to] = controller ? [$("run"), $("stop")] : [$("stop"), $("run")];
  const hadFocus = document.activeElement === from;
  running = controller;
  to.disabled = false;
  if (hadFocus) to.focus();
  from.disabled = true;
  $("model").disabled = Boolean(controller);
}

function showModel(chosen) {
  model = chosen;
  $("model-name").textContent = model.id;
  const { proposers, default: usual } = model.speculation ?? ONLY_PLAIN;
  // The baseline first, so that the others' speed-up is known while they run; the default last.
  const place = ({ name }) => (name === "plain" ? -1 : name === usual ? 1 : 0);
  let others = 0;
  const series = ({ name }) => (name === "plain" ? "plain" : name === usual ? 0 : (others++ % 3) + 1);
  const sorted = [...proposers].sort((a, b) => place(a) - place(b));
  columns = sorted.map((proposer) => new Column(proposer, `series-${series(proposer)}`));
  $("columns").replaceChildren(...columns.map((column) => column.node));
  const deepest = Math.max(...columns.map((column) => column.depth));
  $("depth").max = $("depth").value = Math.max(deepest, 1);
  $("depth-field").hidden = deepest === 0;
  if (model.max_model_len) $("max-tokens").max = model.max_model_len;
  $("max-tokens").value = Math.min(128, model.max_model_len ?? 128);
  $("chat-field").hidden = !model.chat;
  $("chat").checked = false;
  drawSoon(true);
}

/** Read /v1/models; while the server loads its models, again and again. */
async function load() {
  try {
    const response = await fetch("/v1/models");
    if (response.status === 503) setTimeout(load, 2000);
    if (!response.ok) throw await refusal(response);
    const { data } = await response.json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id)));
    $("model").hidden = data.length < 2;
    $("model-name").hidden = data.length > 1;
    showModel(data[0]);
    $("banner").hidden = true;
    $("run").disabled = false;
    $("model").onchange = () => showModel(data[$("model").selectedIndex]);
  } catch (error) {
    $("run").disabled = true;
    $("banner").textContent = explain(error, false);
    $("banner").hidden = false;
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape") running?.abort();
});
new ResizeObserver(() => drawSoon(true)).observe($("columns"));
load();
