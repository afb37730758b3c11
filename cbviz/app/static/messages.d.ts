// What the kernel and the page say to each other. The kernel's side: app/wire.py, player.py, debugger.py.
// A message is a small JSON head and, for pictures, binary buffers in the order of its list `b`.

/** A sentence of the Why panel, with the ids of the requests that it names. */
export interface Sentence {
  kind: string;
  text: string;
  ids: string[];
}

/** What is known of the recording as a whole. */
export interface Meta {
  clock: string;
  device: string;
  peak_bytes_s: number;
  peak_flops_s: number;
  peaks_measured: boolean;
  model: string;
  runner: string;
  workload: string;
  /** Why something is absent, by its name. */
  missing: Record<string, string>;
  /** Sliding window and attention sinks, in tokens; 0: none. */
  window: number;
  sinks: number;
  /** Bytes of keys and values a token. */
  kv_bytes: number;
}

/** A request as it arrived. `of`: the request that this one is another sequence of. */
export interface RequestHead {
  id: string;
  of?: string;
  /** Number of prompt tokens. */
  np: number;
  /** Most new tokens. */
  mt: number;
  /** Priority. */
  pr: number;
  /** Step of arrival. */
  at: number;
  prompt: string | null;
}

/** The settings in force at the cursor. */
export interface StepConfig {
  discipline?: string;
  policy?: string;
  budget?: number;
  max_num_seqs?: number;
  swap_blocks?: number;
}

/** Tokens of each expert, a row a sparse layer: in the step, and in all steps up to it. */
export interface ExpertLoad {
  layers: number[];
  load: number[][];
  sum: number[][];
}

/** A choice of a beam search: rows of its beams, whose words each went on, the words and the log-probabilities. */
export type BeamChoice = [step: number, rows: number[], parents: number[], words: string[], scores: number[]];

export interface Picture {
  type: "picture";
  /** Number of the message, which the page acknowledges. */
  seq: number;
  /** Names of the buffers, in their order. */
  b: (keyof Buffers)[];
  /** The run is another one: forget what was there. */
  reset?: boolean;
  /** The state comes whole, not as changes. */
  full?: boolean;
  num_blocks: number;
  block_size: number;
  /** Names of the columns of figures. */
  series: string[];
  meta: Meta;
  steps: number;
  step: number;
  event?: number | null;
  words?: string[];
  requests?: RequestHead[];
  /** Output words: row, words, the step of each. */
  out?: [row: number, words: string[], steps: number[]][];
  /** Beam searches that have ended: row and step. */
  ended?: [row: number, step: number][];
  beams?: BeamChoice[];
  pad?: number;
  /** Blocks copied on write in the step: from, to. */
  copies?: [number, number][];
  config?: StepConfig;
  experts?: ExpertLoad;
  live?: Live;
}

/** The binary parts of a picture; 32-bit words but for `series`, which holds 64-bit floats. */
export interface Buffers {
  /** The timeline whole: where each row's segments begin, and the segments. */
  ptr?: DataView<ArrayBuffer>;
  seg?: DataView<ArrayBuffer>;
  /** New segments of the timeline: row, step, state. */
  tr?: DataView<ArrayBuffer>;
  /** Figures, a row a step. */
  series?: DataView<ArrayBuffer>;
  rows?: DataView<ArrayBuffer>;
  /** Two words a block, all of them. */
  words?: DataView<ArrayBuffer>;
  /** Blocks that changed: index and its two words. */
  blocks?: DataView<ArrayBuffer>;
  /** Blocks that the last step changed. */
  marks?: DataView<ArrayBuffer>;
  /** Number waiting, then rows: who waits, who runs. */
  queue?: DataView<ArrayBuffer>;
  /** The batch: row, first position, tokens, kind and drafts. */
  chunks?: DataView<ArrayBuffer>;
}

export interface Notice {
  id: number;
  text: string;
  bad: boolean;
}

/** What the page shows of the session itself, not of the run at the cursor. */
export interface Live {
  loading?: string | null;
  progress?: number;
  open?: boolean;
  playing?: boolean;
  speed?: number;
  num_requests?: number;
  title?: string[];
  /** Why this is a recording; empty: it has an engine. */
  recording?: string;
  banner?: string | null;
  bad?: boolean;
  offer?: { cmd: string; name?: string; text: string } | null;
  notices?: Notice[];
  /** Name of the run in the address. */
  run?: string;
  allow_code?: boolean;
  beams?: boolean;
  max_model_len?: number;
  can_calibrate?: boolean;
  can_watch?: boolean;
  alone?: boolean;
}

export interface LiveMessage {
  type: "live";
  live: Live;
}

/** A select's choice: its value, its text, and what it means. */
export type Choice = [value: string, text: string, help?: string];

/** A setting of the Setup panel. */
export interface Field {
  name: string;
  label: string;
  kind: "select" | "int" | "float" | "bool";
  value: string | number | boolean | null;
  help: string;
  options: Choice[];
  /** Values whose help stands below the field. */
  noted?: string[];
  min?: number;
  max?: number;
  placeholder?: string;
  /** Takes effect at once, without a restart. */
  live?: boolean;
  cls?: string;
  group?: string;
  /** False: not at its usual value, so its group is opened. */
  plain?: boolean;
}

export interface ControlsMessage {
  type: "controls";
  fields: Field[];
  notes?: string[];
  locked?: boolean;
}

/** An error or a confirmation of a command, or of a field. */
export interface Said {
  type: "said";
  cmd?: string;
  field?: string;
  error?: string;
  id?: string;
  name?: string;
  policy?: string;
}

/** The sentences of a step, of the event that the cursor has passed, and about what was asked. */
export interface Why {
  type: "why";
  step: number;
  event?: number | null;
  items: Sentence[];
  num_events?: number;
  moment?: Sentence;
  about?: { title: string; items: Sentence[]; request?: string; block?: number };
  /** Watched expressions with their values. */
  watched?: [string, string][];
}

export interface Metrics {
  type: "metrics";
  steps: number;
  clock: string;
  values: Record<string, number>;
}

/** Parts with their amounts; the first one is the total. */
export type Parts = [name: string, amount: number][];

/** Why there are no accounts. */
export interface NoAccount {
  type: "account";
  step: number;
  missing: string;
}

export interface Account {
  type: "account";
  step: number;
  missing?: undefined;
  tokens: Parts;
  slots: Parts;
  at_event?: number;
  run?: { steps: number; tokens: Parts; slots: Parts };
  reservation?: Reservation;
}

/** The run beside contiguous memory: name, help, share of each part, share of requests that had room. */
export interface Reservation {
  missing?: string;
  steps: number;
  parts: string[];
  assumptions: string[];
  rows?: [scheme: string, help: string, shares: number[], placed: number | null][];
}

/** Bars of time in lanes. `name[i]`, `lane[i]`, `start[i]`, `duration[i]` describe bar i. */
export interface Profile {
  names: string[];
  lanes: string[];
  name: number[];
  lane: number[];
  start: number[];
  duration: number[];
  total: number;
  source?: string;
  note?: string[];
}

export type Span = [what: string, start: number, end: number, blocks: number, bytes: number];

export interface Moved {
  clock: string;
  spans: Span[];
  said: string;
}

export interface Inside {
  type: "inside";
  step: number;
  moved?: Moved | null;
  watched: number[];
  device: string[];
  profile: Profile | null;
}

export interface Branch {
  name: string;
  parent: string | null;
  at: number;
  steps: number;
  shown: boolean;
  /** It has an engine, so it can go on. */
  live: boolean;
  done: boolean;
  root: boolean;
}

export interface Family {
  type: "family";
  name: string;
  branches: Branch[];
}

export interface ForkField {
  name: string;
  label: string;
  kind: string;
  value: string | number | null;
  options: Choice[];
  /** It may change here; else only at step 0. */
  open: boolean;
  help: string;
  min?: number;
  max?: number;
}

export interface ForkFormMessage {
  type: "forkform";
  at: number;
  name: string;
  fields: ForkField[];
}

export interface Breakpoint {
  name: string;
  enabled: boolean;
  hits: number;
  error: string | null;
}

export interface BreaksMessage {
  type: "breaks";
  events: string[];
  items: Breakpoint[];
  watches: string[];
}

/** Where the run stopped and at which breakpoints; step -1: it did not. */
export interface Stop {
  type: "stop";
  step: number;
  names: string[];
  sentences: { text: string; request_ids: string[] }[];
  text: string;
}

export interface SavedFile {
  id: string;
  label: string;
}

export interface FilesMessage {
  type: "files";
  files: SavedFile[];
}

/** Where two runs part: what each did at that step. */
export interface Parting {
  step: number;
  changed: string[];
  ours: Sentence[];
  theirs: Sentence[];
}

/** One run against the first. */
export interface Pair {
  name: string;
  tokens_equal: boolean;
  schedules_equal: boolean;
  blocks_equal: boolean;
  partial: boolean;
  proof: string;
  /** Equal up to this step, as far as both have come. */
  so_far: number | null;
  parting: Parting | null;
  causes: Sentence[];
  notes: string[];
}

/** Steps of another run beside those of the first, by time, and back. */
export interface StepTable {
  there: number[];
  back: number[];
}

export interface Compared {
  type: "compared";
  picks: string[];
  runs: { name: string; steps: number }[];
  rows: { key: string; title: string; cells: string[]; ratios: (number | null)[] }[];
  notes: string[];
  pairs: Pair[];
  /** A table for each run but the first; null: the clocks differ. */
  by_time: StepTable[] | null;
}

/** One of the compared runs, as a picture; `i` is its place. */
export type ComparedRun = Omit<Picture, "type"> & { type: "comparedrun"; i: number };

/** A request beside the same request computed alone. */
export interface Alone {
  type: "alone";
  id: string;
  step: number;
  equal: boolean;
  sentences: string[];
  /** Largest difference by layer and position, and the same in units in the last place; null: not known. */
  apart: (number | null)[][];
  ulps: (number | null)[][];
  num_prompt: number;
  /** First position and step of each chunk; step 0: from the prefix cache. */
  chunks: [start: number, step: number][];
  tokens: AloneToken[];
  /** Layer, operator, largest difference, units in the last place, share of numbers that differ. */
  ops: [layer: number, operator: string, difference: number, ulps: number, share: number][];
  /** Rows of the pass: among others, alone. */
  rows: [number, number];
}

export interface AloneToken {
  position: number;
  text: string;
  text_alone: string;
  changed: boolean;
  /** Difference of the log-probability, and lead over the second best, in nats. */
  apart: number;
  gap: number;
}

export interface SaveMessage {
  type: "save";
  name: string;
}

export type FromKernel =
  | Picture
  | LiveMessage
  | ControlsMessage
  | Said
  | Why
  | Metrics
  | Account
  | NoAccount
  | Inside
  | Family
  | ForkFormMessage
  | BreaksMessage
  | Stop
  | FilesMessage
  | Compared
  | ComparedRun
  | Alone
  | SaveMessage
  | { type: "clear" }
  | { type: "here"; n: number };

/** A command of the user; which keys it has depends on `cmd`. */
export interface Command {
  type: "cmd";
  cmd: string;
  [key: string]: unknown;
}

export type ToKernel =
  | Command
  | { type: "ready" }
  | { type: "leaving" }
  | { type: "here"; n: number }
  | { type: "ack"; seq: number }
  | { type: "error"; msg: string };

/** What the page needs of anywidget's model; an exported page has a stand-in. */
export interface KernelModel {
  get(name: string): unknown;
  send(message: ToKernel): void;
  on(event: string, listener: (message: FromKernel, buffers: DataView<ArrayBuffer>[]) => void): void;
  off(event: string, listener: (message: FromKernel, buffers: DataView<ArrayBuffer>[]) => void): void;
}
