// The playground: sends one prompt to every method that is switched on and draws what streams back.
// Text of a model enters the page as textContent only; drawing happens once per animation frame.

const LABELS = { plain: "Plain", eagle3: "EAGLE-3", peagle: "P-EAGLE", ngram: "Prompt lookup" };
const ONLY_PLAIN = { default: "plain", proposers: [{ name: "plain", num_speculative_tokens: 0 }] };
const GHOST_MS = 900; // how long refused drafts stay
const GHOST_HOLD_MS = 150; // the least time before newer ones replace them
const NUMBERS_MS = 120; // between two updates of numbers and charts
const SLOW_STEP_MS = 700; // a step in slow motion
const TREE = { column: 70, row: 26, node: 20, gap: 12, letters: 7 }; // of the drawing: pixels, and letters of a node
const NONE = "–";
// [name, prompt]: the code model that ships with the server completes these well.
const EXAMPLES = [
  ["Decorator", `import functools
import warnings


def deprecated(message):
    """Warn at each call of a function."""

    def decorator(func):
        @functools.wraps(func)
        def wrapper(*args, **kwargs):
            warnings.warn(message, DeprecationWarning)
`],
  ["Class", `class Proxy:
    """Pass everything on to another object."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return getattr(self._target, name)

    def __len__(self):
        return len(self._target)

    def __iter__(self):
`],
  ["Cache", `import functools


def memoize(func):
    """Remember the results of a function."""
    cache = {}

    @functools.wraps(func)
    def wrapper(*args):
        if args not in cache:
            cache[args] = func(*args)
`],
  ["Generator", `def chunks(items, size):
    """Yield parts of the list."""
    for i in range(0, len(items), size):
`],
];
const CHAT_EXAMPLES = [
  ["Explain", "Explain in three sentences how a hash table works."],
  ["Write code", "Write a Python function that returns the n-th Fibonacci number."],
  ["Compare", "When is a list better than a tuple in Python, and when is it worse?"],
  ["Count", "Write the numbers from 1 to 20 as words, separated by commas."],
];

const $ = (id) => document.getElementById(id);
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const narrow = matchMedia("(max-width: 40rem)"); // one column, as in the style sheet

/** An error whose message is meant for the reader of the page. */
class Problem extends Error {}

// ---- the wire ----

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
 * hold back or drop the text of tokens. Removes from `tokens` those up to the last one found. */
export function alignTokens(text, tokens) {
  const parts = [];
  let [end, used] = [0, 0];
  for (const [i, [piece, drafted]] of tokens.entries()) {
    const start = piece ? text.indexOf(piece, end) : -1;
    if (start < 0) continue;
    if (start > end) parts.push([text.slice(end, start), false]);
    parts.push([piece, drafted]);
    end = start + piece.length;
    used = i + 1;
  }
  tokens.splice(0, used);
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

// ---- measuring ----

/** Counts of one answer. Times are in seconds since its request. */
export class Meter {
  constructor(depth) {
    Object.assign(this, { points: [], tokens: 0, drafts: 0, drafted: 0, accepted: 0 });
    this.perPosition = Array(depth).fill(0);
    this.ofText = null; // by position, the accepted tokens that the text alone drafted; null where it drafts none
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
    if (speculation.text_from === undefined) return;
    this.ofText ??= [];
    for (let i = speculation.text_from; i < speculation.num_accepted; i++) this.ofText[i] = (this.ofText[i] ?? 0) + 1;
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
    this.ofText = totals.num_accepted_text_tokens_per_pos ?? null;
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

  get acceptanceOfText() {
    return this.perPosition.map((_, i) => (this.drafts ? (this.ofText[i] ?? 0) / this.drafts : 0));
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

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Whether the spreads [smallest, largest] of two methods overlap: their difference is then noise. */
export const overlap = (a, b) => Boolean(a && b) && a[0] <= b[1] && b[0] <= a[1];

/** Where an answer parts from plain's, in words; null where all tokens and the text are the same.
 * An answer is {tokens, text}. */
export function differenceFrom(plain, answer) {
  const quote = (token) => (token === undefined ? "the end" : `“${token.replaceAll("\n", "⏎")}”`);
  for (let i = 0; i < Math.max(plain.tokens.length, answer.tokens.length); i++) {
    const [theirs, ours] = [plain.tokens[i], answer.tokens[i]];
    if (theirs !== ours) return `token ${i + 1}: ${quote(ours)}, plain has ${quote(theirs)}`;
  }
  if (plain.text === answer.text) return null;
  // Parts of a character look alike as tokens.
  let i = 0;
  while (plain.text[i] === answer.text[i]) i++;
  return `character ${i + 1}`;
}

// ---- drawing ----

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

/** Bars of accepted shares by position; of each, the part that the text alone drafted is hollow, if `ofText` tells it. */
function drawPositions(svg, shares, ofText, isMeasured) {
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
    );
    const hollow = (height - top - bottom) * (ofText?.[i] ?? 0);
    if (hollow) svg.append(shape("rect", { class: "bar hollow", y: height - bottom - rise, height: hollow, ...at }));
    const number = { x: middle, y: height - 4, "text-anchor": "middle" };
    if (slot >= 16 || i % 5 === 4) svg.append(shape("text", number, i + 1));
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

function drawSpeedups(svg, columns, baseline) {
  svg.style.height = `${columns.length * 60 + 32}px`;
  const [width, height] = canvas(svg);
  const fastest = (column) => (baseline && column.spread ? column.spread[1] / baseline : (column.speedup ?? 0));
  const largest = Math.max(1, ...columns.map(fastest));
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
    if (!column.spread || !baseline) return;
    const [from, to] = column.spread.map((rate) => (rate / baseline) * scale);
    const middle = bar.y + bar.height / 2;
    svg.append(shape("path", { class: "spread", d: `M${from} ${middle}H${to}M${from} ${middle - 5}v10M${to} ${middle - 5}v10` }));
  });
  if (!columns.some((column) => column.proposer.name === "plain")) {
    svg.append(shape("text", { x: 0, y: height - 3 }, "Run plain decoding too: it is the measure."));
  }
  const line = { x1: scale, x2: scale, y1: 10, y2: 10 + row * columns.length, class: "reference" };
  if (columns.some((column) => column.speedup !== null)) svg.append(shape("line", line));
}

/** Where the nodes of a tree stand: [{text, parent, isAccepted, depth, line}], the newest token,
 * whose parent is null, first. Siblings stand below each other, the accepted or likeliest one on
 * the line of its parent. `tree` is the server's: [text, row of the parent, is accepted]. */
export function layTree(tree, root) {
  const nodes = [{ text: root, parent: null, isAccepted: true, depth: 0 }];
  for (const [text, parent, isAccepted] of tree) {
    nodes.push({ text, parent: nodes[parent], isAccepted, depth: nodes[parent].depth + 1 });
  }
  let lines = 0;
  const place = (node) => {
    node.line = lines;
    const following = nodes.filter(({ parent }) => parent === node);
    following.sort((a, b) => b.isAccepted - a.isAccepted);
    if (!following.length) lines += 1;
    following.forEach(place);
  };
  place(nodes[0]);
  return nodes;
}

/** Line breaks are visible, and long texts are cut. */
function nodeText(text) {
  const letters = [...text.replaceAll("\n", "⏎").trim()];
  if (!letters.length) return "␣";
  return letters.length > TREE.letters ? `${letters.slice(0, TREE.letters - 1).join("")}…` : letters.join("");
}

function drawTree(svg, nodes) {
  const { column, row, node: height, gap } = TREE;
  svg.setAttribute("width", column * (1 + Math.max(0, ...nodes.map(({ depth }) => depth))));
  svg.setAttribute("height", row * (1 + Math.max(0, ...nodes.map(({ line }) => line))));
  const at = ({ depth, line }) => [depth * column, line * row + row / 2];
  const edges = [];
  const boxes = nodes.map((node) => {
    const [x, y] = at(node);
    const mark = !node.parent ? " root" : node.isAccepted ? " lit" : "";
    if (node.parent) {
      const [fromX, fromY] = at(node.parent);
      const start = fromX + column - gap;
      const middle = start + gap / 2;
      const d = `M${start} ${fromY}H${middle}V${y}H${x}`;
      edges.push(shape("path", { class: `edge${mark}`, d }));
    }
    const box = shape("g", { class: `node${mark}` });
    const width = column - gap;
    const label = { x: x + width / 2, y: y + 4, "text-anchor": "middle" };
    box.append(
      shape("title", {}, node.text),
      shape("rect", { x, y: y - height / 2, width, height, rx: 3 }),
      shape("text", label, nodeText(node.text)),
    );
    return box;
  });
  // What is lit lies above the rest.
  edges.sort((a, b) => a.classList.contains("lit") - b.classList.contains("lit"));
  svg.replaceChildren(...edges, ...boxes);
}

const refusedDrafts = (texts) => texts.map((text) => element("s", "refused", text.replaceAll("\n", "⏎")));

// ---- a column ----

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

  get isPlain() {
    return this.proposer.name === "plain";
  }

  get isOn() {
    return this.find(".on").checked;
  }

  /** Forget the last run; `prompt` is what the answers go on with. */
  clear(depth, prompt = "") {
    this.prompt = prompt;
    this.rates = []; // tokens/s of each finished run
    this.comparisons = []; // with plain, of each finished run: null where identical
    this.find(".problem").hidden = this.find(".badge").hidden = this.find(".tree").hidden = true;
    this.find(".positions").hidden = depth === 0;
    this.setState("");
    this.begin(depth);
  }

  /** Make ready for a run. */
  begin(depth) {
    this.meter = new Meter(depth);
    this.steps = []; // the server's report of each, with `parts`: [text, is a draft, is reasoning]
    this.hasReports = false;
    this.tree = null; // number of the last step with a tree, if it is not drawn yet
    this.unplaced = []; // tokens of the last step whose text has not come yet
    this.reasoning = this.answer = "";
    this.finishReason = null;
    this.empty();
  }

  /** Show the prompt alone. */
  empty() {
    this.pending = []; // parts that are not drawn yet
    this.refused = null; // drafts of the last step that are not drawn yet
    this.ghosts = this.container = null;
    this.output.replaceChildren();
    if (this.prompt) this.output.append(element("span", "prompt", this.prompt));
    this.output.scrollTop = this.output.scrollHeight;
  }

  setState(text, isRunning = false) {
    this.find(".state").textContent = text;
    this.node.classList.toggle("running", isRunning);
  }

  /** Ask and read to the end; never throws. Returns "done", "stopped" or "failed". */
  async run(settings, signal) {
    this.begin(settings.depth(this));
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
      if (this.meter.rate !== null) this.rates.push(this.meter.rate);
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
    const reasoning = choice?.delta?.reasoning_content ?? "";
    const answer = choice?.text ?? choice?.delta?.content ?? "";
    // The report comes with the first text of a step; the rest of its text follows without one.
    this.hasReports ||= Boolean(chunk.speculation);
    const isStep = chunk.speculation || (reasoning + answer && !this.hasReports);
    if (isStep) this.addStep(chunk.speculation ?? { tokens: [[reasoning + answer, false]], rejected: [] });
    this.addText(reasoning, true);
    this.addText(answer, false);
    this.reasoning += reasoning;
    this.answer += answer;
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.usage) this.meter.finish(chunk.usage);
    drawSoon();
  }

  addStep(report) {
    if (!report.tokens.length) return;
    this.meter.step((performance.now() - this.startedAt) / 1000, report.tokens.length, report);
    const before = this.steps.at(-1)?.tokens.at(-1)[0];
    this.steps.push({ ...report, before, parts: [] });
    this.unplaced = [...report.tokens];
    // The refused drafts of a tree do not follow each other: its drawing has them.
    this.refused = report.tree ? null : report.rejected;
    if (report.tree) this.tree = this.steps.length;
  }

  addText(text, isReasoning) {
    const parts = alignTokens(text, this.unplaced).map((part) => [...part, isReasoning]);
    this.steps.at(-1)?.parts.push(...parts);
    this.pending.push(...parts);
  }

  /** Compare the last run with plain's, token by token, and tell all comparisons so far. */
  compare(plain, isGreedy) {
    const told = ({ steps, reasoning, answer }) => {
      const tokens = steps.flatMap((step) => step.tokens.map(([text]) => text));
      return { tokens, text: reasoning + answer };
    };
    this.comparisons.push(differenceFrom(told(plain), told(this)));
    const differences = this.comparisons.filter((difference) => difference !== null);
    const count = this.comparisons.length;
    const [which, often] = differences.length ? ["Differs from", differences.length] : ["Identical to", count];
    const inRuns = count > 1 ? ` in ${often} of ${count} runs` : "";
    const place = differences.length ? `${inRuns && ","} at ${differences[0]}` : "";
    const text = `${which} plain${inRuns}${place}`;
    if (isGreedy) this.setBadge(text, differences.length ? "differs" : "identical");
    else this.setBadge(`Sampled. ${text}`, "neutral");
  }

  setBadge(text, kind) {
    const badge = this.find(".badge");
    badge.className = `badge ${kind}`;
    badge.textContent = text;
    badge.hidden = false;
  }

  drawTokens(now) {
    const isGhostDue = this.refused && now - (this.ghostsAt ?? 0) >= GHOST_HOLD_MS;
    if (!this.pending.length && !isGhostDue) return;
    const { output } = this;
    const isFollowing = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    this.append(this.pending);
    this.pending = [];
    if (isGhostDue) this.drawGhosts(now);
    if (isFollowing) output.scrollTop = output.scrollHeight;
  }

  /** Put tokens at the end of the text, before refused drafts; reasoning stands apart. */
  append(parts, mark = "") {
    for (const [text, drafted, isReasoning] of parts) {
      const name = isReasoning ? "reasoning" : "answer";
      if (this.container?.className !== name) {
        this.container = element("span", name);
        this.output.append(this.container);
      }
      const token = element("span", `token${drafted ? " draft" : ""}${mark}`, text);
      this.container.insertBefore(token, this.ghosts?.parentNode === this.container ? this.ghosts : null);
    }
  }

  /** Show the first `number` steps, the last of them with the drafts that it refused. */
  showStep(number) {
    const { steps, output } = this;
    if (!steps.length) return;
    this.empty();
    this.append(steps.slice(0, number - 1).flatMap((step) => step.parts));
    const step = steps[number - 1];
    if (step) {
      // The target's own token took the place of the first draft that it refused.
      const own = step.parts.findLastIndex(([, drafted]) => drafted) + 1;
      this.append(step.parts.slice(0, own), " current");
      if (!step.tree) (this.container ?? output).append(...refusedDrafts(step.rejected));
      this.append(step.parts.slice(own), " current");
      const accepted = (step.num_drafted ?? 0) - step.rejected.length;
      const cut = accepted > step.num_accepted ? `, ${accepted - step.num_accepted} past the end` : "";
      const drafts = step.num_drafted ? `${accepted} of ${step.num_drafted} accepted${cut}` : "no drafts";
      this.setState(`step ${number}: ${drafts}`);
      if (!this.find(".tree").hidden) this.drawTree(number);
    } else this.setState(`ended after ${steps.length} steps`);
    output.scrollTop = output.scrollHeight;
  }

  /** Draw the tree of a step, and write its nodes into a table for those who do not see it. */
  drawTree(number) {
    const step = this.steps[number - 1];
    const { tree = [], before = "" } = step;
    const nodes = tree.length ? layTree(tree, before) : [];
    const count = tree.filter(([, , isAccepted]) => isAccepted).length;
    const figure = this.find(".tree");
    figure.hidden = false;
    const told = tree.length ? `Tree of step ${number}: ${count} of ${tree.length} nodes accepted` : `Step ${number} has no tree`;
    figure.querySelector("figcaption").textContent = told;
    drawTree(figure.querySelector("svg"), nodes);
    const row = ({ text, parent, isAccepted, depth }) => {
      const line = element("tr");
      const accepted = depth > step.text_from ? "yes, drafted by the text alone" : "yes";
      const cells = [depth, text, parent.text, isAccepted ? accepted : "no"];
      line.append(...cells.map((cell) => element("td", "", cell)));
      return line;
    };
    figure.querySelector("tbody").replaceChildren(...nodes.slice(1).map(row));
  }

  /** The refused drafts stand at the end of the text, fade and go. */
  drawGhosts(now) {
    this.ghosts?.remove();
    const refused = this.refused;
    this.refused = null;
    if (!refused.length || reducedMotion.matches) return;
    const ghosts = element("span", "ghosts");
    ghosts.setAttribute("aria-hidden", "true");
    ghosts.append(...refusedDrafts(refused));
    (this.container ?? this.output).append(ghosts);
    [this.ghosts, this.ghostsAt] = [ghosts, now];
    setTimeout(() => ghosts.classList.add("fading"), GHOST_MS - 400);
    setTimeout(() => ghosts.remove(), GHOST_MS);
  }

  /** Tokens/s: the median of the finished runs, or of the first one so far. */
  get rate() {
    return this.rates.length ? median(this.rates) : this.meter.rate;
  }

  /** [smallest, largest] rate of several runs. */
  get spread() {
    return this.rates.length > 1 ? [Math.min(...this.rates), Math.max(...this.rates)] : null;
  }

  drawNumbers(baseline) {
    const { meter } = this;
    this.speedup = baseline?.rate && this.rate ? this.rate / baseline.rate : null;
    this.isNoise = baseline !== this && overlap(this.spread, baseline?.spread);
    const stats = { rate: speed(this.rate), speedup: fixed(this.speedup, 2, "×") };
    if (this.isNoise) stats.speedup += " noise";
    stats.acceptance = fixed(meter.acceptanceLength, 2);
    stats.first = meter.firstToken === null ? NONE : `${Math.round(meter.firstToken * 1000)} ms`;
    for (const [name, text] of Object.entries(stats)) this.find(`[data-stat=${name}]`).textContent = text;
    const ofText = this.proposer.name !== "ngram" && meter.ofText ? meter.acceptanceOfText : null;
    let drafts = meter.drafts ? ` · ${meter.accepted} of ${meter.drafted} draft tokens accepted` : "";
    if (ofText) drafts += `, ${meter.ofText.reduce((sum, count) => sum + count, 0)} of them drafted by the text alone`;
    const counts = `${meter.tokens} tokens in ${meter.seconds.toFixed(2)} s${drafts}`;
    this.find(".counts").textContent = meter.tokens ? counts : "";
    if (this.isOn && this.tree) this.drawTree(this.tree);
    this.tree = null;
    if (!this.isOn || !meter.perPosition.length) return;
    drawPositions(this.find(".positions svg"), meter.acceptance, ofText, meter.drafts > 0);
    for (const told of this.node.querySelectorAll(".positions .of-text")) told.hidden = !ofText;
    const row = (share, i) => {
      const line = element("tr");
      line.append(element("td", "", i + 1), element("td", "", percent(share)));
      if (ofText) line.append(element("td", "", percent(ofText[i])));
      return line;
    };
    this.find(".positions tbody").replaceChildren(...meter.acceptance.map(row));
  }
}

// ---- the page ----

let model = null;
let columns = [];
let running = null; // the AbortController of the run
let hasScrolled = false; // the reader has scrolled since the run began
let turns = []; // {user, assistant} of the conversation so far
let replay = null; // the timer of slow motion
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
  const baseline = shown.find((column) => column.isPlain);
  for (const column of columns) column.drawNumbers(baseline);
  drawSpeeds($("speed-chart"), shown);
  drawSpeedups($("speedup-chart"), shown, baseline?.rate);
  $("spread").textContent = describeSpread(shown);
  $("results").tBodies[0].replaceChildren(...shown.map(resultRow));
}

function resultRow(column) {
  const row = element("tr");
  const swatch = shape("svg", { class: "chart", viewBox: "0 0 28 10", "aria-hidden": "true" });
  swatch.append(shape("polyline", { class: `curve ${column.series}`, points: "1,5 27,5" }));
  const head = element("th");
  head.scope = "row";
  head.append(swatch, column.label);
  const cells = [speed(column.rate), fixed(column.speedup, 2, "×"), fixed(column.meter.acceptanceLength, 2)];
  row.append(head, ...cells.map((text) => element("td", "", text)));
  if (column.spread) row.cells[1].append(element("small", "", column.spread.map(speed).join("–")));
  if (column.isNoise) row.cells[2].append(element("small", "", "noise"));
  return row;
}

/** What several runs say about the differences between the methods. */
function describeSpread(columns) {
  const repeated = columns.filter((column) => column.spread);
  if (!repeated.length) return "One run of each method does not show how much its speed varies: set Runs to 3 or more.";
  const pairs = repeated.flatMap((one, i) => repeated.slice(i + 1).map((other) => [one, other]));
  const names = pairs.filter(([one, other]) => overlap(one.spread, other.spread))
    .map(([one, other]) => `${one.label} and ${other.label}`);
  const noise = names.length ? `The difference is noise between ${names.join("; ")}.` : "All differences are larger than the noise.";
  return `Medians of ${repeated[0].rates.length} runs, with the smallest and the largest. Where these ranges overlap, a difference is noise. ${noise}`;
}

/** The form's values as what to send where. */
function readSettings() {
  const prompt = $("prompt").value;
  const isChat = $("chat").checked;
  const common = { model: model.id, stream: true, stream_options: { include_usage: true } };
  common.temperature = $("temperature").valueAsNumber;
  common.max_tokens = $("max-tokens").valueAsNumber;
  if ($("seed").value !== "") common.seed = $("seed").valueAsNumber;
  const messages = turns.flatMap(({ user, assistant }) => [
    { role: "user", content: user },
    { role: "assistant", content: assistant },
  ]);
  const input = isChat ? { messages: [...messages, { role: "user", content: prompt }] } : { prompt };
  const depth = (column) => Math.min(column.depth, $("depth").valueAsNumber);
  const speculation = (column) => {
    return { proposer: column.proposer.name, num_speculative_tokens: depth(column), report: "trees" };
  };
  return {
    path: isChat ? "/v1/chat/completions" : "/v1/completions",
    isChat,
    prompt,
    isGreedy: common.temperature === 0,
    runs: $("runs").valueAsNumber,
    isTogether: $("form").elements.order.value === "together",
    depth,
    body: (column) => ({ ...common, ...input, speculation: speculation(column) }),
  };
}

async function run() {
  if (running || !model || !$("form").reportValidity()) return;
  const chosen = columns.filter((column) => column.isOn);
  if (!chosen.length) return void ($("summary").textContent = "Switch on at least one method below.");
  const settings = readSettings();
  const { signal } = setRunning(new AbortController());
  for (const column of columns) column.clear(settings.depth(column), settings.isChat ? "" : settings.prompt);
  for (const column of chosen) column.setState("waiting");
  drawSoon(true);
  const outcomes = new Map(chosen.map((column) => [column, "done"]));
  for (let number = 1; number <= settings.runs && !signal.aborted; number++) {
    const asked = chosen.filter((column) => outcomes.get(column) === "done");
    await runEach(asked, outcomes, settings, number, signal);
    compareAll(asked.filter((column) => outcomes.get(column) === "done"), settings.isGreedy);
  }
  setRunning(null);
  if (settings.isChat) keepTurn(settings.prompt, chosen.find((column) => outcomes.get(column) === "done"));
  prepareReplay();
  numbersAt = -Infinity;
  draw(performance.now()); // A reader who may run again sees the whole answer.
  $("summary").textContent = summarize(chosen, outcomes);
}

/** One run of each method; `number` counts them. */
async function runEach(asked, outcomes, settings, number, signal) {
  const ask = async (column) => outcomes.set(column, await column.run(settings, signal));
  const ofRuns = settings.runs > 1 ? `, run ${number} of ${settings.runs}` : "";
  if (settings.isTogether) {
    $("summary").textContent = `Running together${ofRuns}: the methods share the machine.`;
    comeIntoView($("answers"));
    await Promise.all(asked.map(ask));
    return;
  }
  for (const [i, column] of asked.entries()) {
    if (signal.aborted || !column.isOn) {
      column.setState("stopped");
      outcomes.set(column, "stopped");
      continue;
    }
    $("summary").textContent = `Running ${column.label} (${i + 1} of ${asked.length}${ofRuns}).`;
    comeIntoView(column.node);
    await ask(column);
  }
}

/** Compare the last answers of methods that finished. */
function compareAll(finished, isGreedy) {
  const plain = finished.find((column) => column.isPlain);
  plain?.setBadge("Reference", "neutral");
  for (const column of finished) {
    if (column === plain) continue;
    if (plain) column.compare(plain, isGreedy);
    else column.setBadge("Not compared: plain has no answer", "neutral");
  }
}

function summarize(chosen, outcomes) {
  const sentences = chosen.map((column) => {
    if (outcomes.get(column) !== "done") return `${column.label} ${outcomes.get(column)}.`;
    const isCompared = column.speedup && !column.isPlain;
    const noise = column.isNoise ? " (noise)" : "";
    const times = isCompared ? `, ${column.speedup.toFixed(2)} times plain${noise}` : "";
    const badge = column.isPlain ? "" : ` ${column.find(".badge").textContent}.`;
    return `${column.label}: ${speed(column.rate)} tokens/s${times}.${badge}`;
  });
  return sentences.join(" ");
}

/** Switch between running and not; returns the controller. */
function setRunning(controller) {
  const [from, to] = controller ? [$("run"), $("stop")] : [$("stop"), $("run")];
  const hadFocus = document.activeElement === from;
  running = controller;
  hasScrolled = false;
  to.disabled = false;
  if (hadFocus) to.focus({ preventScroll: true });
  from.disabled = true;
  $("model").disabled = $("chat").disabled = $("new-conversation").disabled = Boolean(controller);
  document.body.classList.toggle("is-running", Boolean(controller));
  stopReplay();
  if (controller) $("replay").hidden = true;
  return controller;
}

/** On a phone, scroll to an answer as it begins, unless the reader has scrolled since the start. */
function comeIntoView(node) {
  if (!narrow.matches || hasScrolled) return;
  node.scrollIntoView({ behavior: reducedMotion.matches ? "auto" : "smooth" });
}

// ---- the conversation ----

/** The next message follows this answer, which all methods then share. */
function keepTurn(user, column) {
  if (!column) return;
  turns.push({ user, assistant: column.answer });
  $("speaker").textContent = `The conversation goes on with the answer of ${column.label}.`;
  $("prompt").value = "";
  showTurns();
}

function showTurns() {
  const message = (role, name, text) => {
    const item = element("li", role);
    item.append(element("b", "", name), element("span", "", text));
    return item;
  };
  const items = turns.flatMap(({ user, assistant }) => [
    message("user", "You", user),
    message("assistant", "Model", assistant || "(no answer, reasoning only)"),
  ]);
  $("turns").replaceChildren(...items);
  $("turns").scrollTop = $("turns").scrollHeight;
  $("conversation").hidden = !turns.length || !$("chat").checked;
}

function beginConversation() {
  turns = [];
  showTurns();
  showExamples();
}

/** Offer the examples that fit; the first of them unless something else was typed. */
function showExamples() {
  const isChat = $("chat").checked;
  const fitting = isChat ? CHAT_EXAMPLES : EXAMPLES;
  $("prompt-label").textContent = isChat ? "Message" : "Prompt";
  $("prompt").rows = isChat ? 3 : 5;
  const buttons = fitting.map(([name, prompt]) => {
    const button = element("button", "small", name);
    button.type = "button";
    button.addEventListener("click", () => setPrompt(prompt));
    const item = element("li");
    item.append(button);
    return item;
  });
  $("examples").replaceChildren(...buttons);
  const isTyped = $("prompt").value && ![...EXAMPLES, ...CHAT_EXAMPLES].some(([, prompt]) => prompt === $("prompt").value);
  if (!isTyped) setPrompt(fitting[0][1]);
}

/** The end is in sight: there the model goes on. */
function setPrompt(text) {
  $("prompt").value = text;
  $("prompt").scrollTop = $("prompt").scrollHeight;
}

// ---- slow motion ----

/** All methods advance together, one step of the target each. */
function prepareReplay() {
  const longest = Math.max(...columns.map((column) => column.steps.length));
  $("replay").hidden = longest === 0;
  $("step").max = longest;
  $("step").value = longest;
  $("step-label").textContent = `${longest} steps`;
}

function showStep(number) {
  for (const column of columns) if (column.isOn) column.showStep(number);
  $("step").value = number;
  $("step-label").textContent = `step ${number} of ${$("step").max}`;
}

function play() {
  if (replay) return stopReplay();
  const isAtEnd = $("step").value === $("step").max;
  showStep(isAtEnd ? 1 : $("step").valueAsNumber + 1);
  $("play").textContent = "Pause";
  replay = setInterval(() => {
    if ($("step").value === $("step").max) stopReplay();
    else showStep($("step").valueAsNumber + 1);
  }, SLOW_STEP_MS);
}

function stopReplay() {
  clearInterval(replay);
  replay = null;
  $("play").textContent = "Slow motion";
}

// ---- the model ----

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
  $("depth").max = Math.max(deepest, 1);
  preset($("depth"), $("depth").max);
  $("depth-field").hidden = deepest === 0;
  if (model.max_model_len) $("max-tokens").max = model.max_model_len;
  const longest = model.chat ? 512 : 128; // reasoning takes its share
  preset($("max-tokens"), Math.min(longest, Math.ceil((model.max_model_len ?? Infinity) / 2)));
  $("chat-field").hidden = !model.chat;
  $("chat").checked = model.chat;
  beginConversation();
  drawSoon(true);
}

/** Set a field, unless the reader has changed it: the page can be filled in while models load. */
function preset(field, value) {
  if (field.value === field.defaultValue) field.value = field.defaultValue = value;
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
  } else if (event.key === "Escape") {
    running?.abort();
    stopReplay();
  }
});
for (const name of ["wheel", "touchmove"]) document.addEventListener(name, () => (hasScrolled = true), { passive: true });
$("chat").addEventListener("change", () => {
  showTurns();
  showExamples();
});
$("new-conversation").addEventListener("click", () => {
  beginConversation();
  $("prompt").focus();
});
$("play").addEventListener("click", play);
$("step").addEventListener("input", () => {
  stopReplay();
  showStep($("step").valueAsNumber);
});
new ResizeObserver(() => drawSoon(true)).observe($("columns"));
load();
