// Markdown, level one: text into blocks. The subset that models write: headings, paragraphs, lists (nested, with tasks),
// quotes, fenced code, tables, rules, formulas, footnotes and <details>. Other HTML and indented code are not in it: they are
// paragraphs of plain text.
//
// A block's end is decided by the lines after it and never by the lines before it, which is what lets live.js parse
// only the tail of an answer that grows.

/** Quotes and lists inside each other; what lies deeper is text. */
const DEPTH_MAX = 12;
const COLUMNS_MAX = 64;
const MATHS_LINES_MAX = 200;

/**
 * The blocks of `source`, in order. Each has `type`, `start` (offset of its first line) and `raw` (its text).
 * paragraph, heading: `text`. code: `language`, `text`. maths: `text`, `source` (with its marks), `closed` (its end is there). quote: `blocks`. table: `align`, `head`, `rows`.
 * details: `summary`, `open`, `blocks`. footnote: `label`, `blocks`.
 * list: `ordered`, `first`, `tight`, `items` of `{ task, blocks }`, where `task` is null or whether it is done.
 */
export function parseBlocks(source) {
  const lines = source.split('\n');
  const offsets = [0];
  for (const line of lines) offsets.push(offsets.at(-1) + line.length + 1);
  return parseLines(lines, 0).map(({ from, to, ...block }) => ({
    ...block,
    start: offsets[from],
    raw: lines.slice(from, to).join('\n'),
  }));
}

function parseLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block = parseBlock(lines, at, depth);
    blocks.push({ ...block, from: at });
    at = block.to;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  const nests = depth < DEPTH_MAX;
  if (fenceOf(line)) return parseCode(lines, at);
  const maths = mathsAt(lines, at);
  if (maths) return maths;
  if (headingOf(line)) return { type: 'heading', ...headingOf(line), to: at + 1 };
  if (isRule(line)) return { type: 'rule', to: at + 1 };
  if (nests && detailsOf(line)) return parseDetails(lines, at, depth);
  if (nests && noteOf(line)) return parseNote(lines, at, depth);
  if (nests && isQuote(line)) return parseQuote(lines, at, depth);
  if (nests && markerOf(line)) return parseList(lines, at, depth);
  if (isTable(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at, depth);
}

/** Whether a line ends the paragraph before it. As in CommonMark, a list does so only if it starts with 1 and says something. */
function interrupts(lines, at, depth) {
  const line = lines[at];
  if (isBlank(line) || fenceOf(line) || headingOf(line) || isRule(line) || isTable(lines, at) || mathsAt(lines, at)) return true;
  if (depth >= DEPTH_MAX) return false;
  if (isQuote(line) || detailsOf(line) || noteOf(line)) return true;
  const marker = markerOf(line);
  return marker !== null && marker.rest !== '' && (!marker.ordered || marker.first === 1);
}

function parseParagraph(lines, at, depth) {
  let to = at + 1;
  while (to < lines.length && !interrupts(lines, to, depth)) to += 1;
  // Leading spaces go; trailing ones stay, two of them are a line break.
  const text = lines.slice(at, to).map((line) => line.trimStart()).join('\n').trimEnd();
  return { type: 'paragraph', text, to };
}

function fenceOf(line) {
  const match = /^( {0,3})(`{3,}|~{3,})([^\n]*)$/.exec(line);
  if (!match || (match[2][0] === '`' && match[3].includes('`'))) return null;
  return { indent: match[1].length, mark: match[2], info: match[3].trim() };
}

function parseCode(lines, at) {
  const { indent, mark, info } = fenceOf(lines[at]);
  const text = [];
  let to = at + 1;
  for (; to < lines.length; to += 1) {
    const end = fenceOf(lines[to]);
    if (end && end.info === '' && end.mark.startsWith(mark)) break;
    text.push(lines[to].slice(Math.min(indent, indentOf(lines[to]))));
  }
  return { type: 'code', language: info.split(/\s/, 1)[0], text: text.join('\n'), to: Math.min(to + 1, lines.length) };
}

/**
 * A formula that has its lines for itself: from `$$` or `\\[` at the start of a line to `$$` or `\\]` at the end of one. An
 * empty line before its end makes it ordinary text, as in TeX.
 */
function mathsAt(lines, at) {
  const open = /^ {0,3}(\$\$|\\\[)/.exec(lines[at]);
  if (!open) return null;
  const close = open[1] === '$$' ? '$$' : '\\]';
  const text = [];
  let closed = false;
  let to = at;
  for (; to < lines.length && !closed; to += 1) {
    const line = to === at ? lines[to].slice(open[0].length) : lines[to];
    const end = line.indexOf(close);
    closed = end >= 0;
    const gap = to > at && to < lines.length - 1 && isBlank(line); // the last line may still be written
    if (gap || (closed && !isBlank(line.slice(end + close.length))) || to - at >= MATHS_LINES_MAX) return null;
    text.push(closed ? line.slice(0, end) : line);
  }
  if (closed && isBlank(text.join(''))) return null;
  return { type: 'maths', text: text.join('\n').trim(), source: lines.slice(at, to).join('\n'), closed, to };
}

function headingOf(line) {
  const match = /^ {0,3}(#{1,6})(?:[ \t]|$)/.exec(line);
  if (!match) return null;
  let text = line.slice(match[0].length).trim();
  const closing = /(?:^|[ \t])#+$/.exec(text.slice(-80));
  if (closing) text = text.slice(0, text.length - closing[0].length).trimEnd();
  return { level: match[1].length, text };
}

function isRule(line) {
  const marks = line.replace(/[ \t]/g, '');
  return marks.length >= 3 && '-*_'.includes(marks[0]) && indentOf(line) <= 3 && [...marks].every((mark) => mark === marks[0]);
}

function isQuote(line) {
  return /^ {0,3}>/.test(line);
}

function parseQuote(lines, at, depth) {
  const inner = [];
  let to = at;
  for (; to < lines.length; to += 1) {
    if (isQuote(lines[to])) inner.push(lines[to].replace(/^ {0,3}> ?/, ''));
    else if (interrupts(lines, to, depth) || isBlank(inner.at(-1))) break;
    else inner.push(lines[to]); // a paragraph's line may leave its ">" out
  }
  return { type: 'quote', blocks: parseLines(inner, depth + 1), to };
}

/** `<details>`, perhaps `open`, and what follows in its line. */
function detailsOf(line) {
  const match = /^ {0,3}<details(\s+open(?:="")?)?\s*>/i.exec(line);
  return match && { open: match[1] !== undefined, rest: line.slice(match[0].length) };
}

/** From `<details>` to its `</details>`, or as far as it is written. Text after the end, in its line, goes with it. */
function parseDetails(lines, at, depth) {
  const { open, rest } = detailsOf(lines[at]);
  const inner = [];
  let nested = 1;
  let to = at;
  for (; to < lines.length && nested > 0; to += 1) {
    const line = to === at ? rest : lines[to];
    if (to > at && detailsOf(line)) nested += 1;
    const end = line.toLowerCase().indexOf('</details>');
    if (end >= 0) nested -= 1;
    inner.push(nested === 0 ? `${line.slice(0, end)}${line.slice(end + '</details>'.length)}` : line);
  }
  const { summary, rest: text } = summaryOf(inner.join('\n'));
  return { type: 'details', open, summary, blocks: parseLines(text.split('\n'), depth + 1), to };
}

function summaryOf(text) {
  const match = /^\s*<summary>([^]{0,2000}?)(?:<\/summary>|\n\s*\n|$)/i.exec(text);
  return match ? { summary: match[1].trim(), rest: text.slice(match[0].length) } : { summary: '', rest: text };
}

/** `[^label]: text` */
function noteOf(line) {
  const match = /^ {0,3}\[\^([^\]\s]{1,40})\]:[ \t]*/.exec(line);
  return match && { label: match[1], rest: line.slice(match[0].length) };
}

/** A note goes on in lines that are indented, and in those that continue its first paragraph. */
function parseNote(lines, at, depth) {
  const { label, rest } = noteOf(lines[at]);
  const inner = [rest];
  let to = at + 1;
  for (; to < lines.length; to += 1) {
    const line = lines[to];
    if (isBlank(line)) {
      if (to + 1 >= lines.length || isBlank(lines[to + 1]) || indentOf(lines[to + 1]) < 2) break;
      inner.push('');
    } else if (indentOf(line) >= 2) inner.push(unindent(line, 4));
    else if (isBlank(inner.at(-1)) || interrupts(lines, to, depth)) break;
    else inner.push(line);
  }
  return { type: 'footnote', label, blocks: parseLines(inner, depth + 1), to };
}

/** Labels of all notes in a text, whether their blocks are complete or not. */
export function noteLabels(source) {
  return new Set(Array.from(source.matchAll(/^ {0,3}\[\^([^\]\s]{1,40})\]:/gm), ([, label]) => label));
}

/** `- `, `* `, `+ `, `1. ` or `1) `: where it stands, what it is, where its text begins. */
function markerOf(line) {
  const match = /^( {0,3})([-*+]|(\d{1,9})([.)]))([ \t]+|$)/.exec(line);
  if (!match) return null;
  const [whole, indent, mark, number, closer, gap] = match;
  return {
    indent: indent.length,
    content: indent.length + mark.length + (gap.length > 4 ? 1 : Math.max(gap.length, 1)),
    kind: closer ?? mark,
    ordered: number !== undefined,
    first: number === undefined ? null : Number(number),
    rest: line.slice(whole.length),
  };
}

function parseList(lines, at, depth) {
  const head = markerOf(lines[at]);
  const items = [];
  let tight = true;
  let to = at;
  while (to < lines.length) {
    const marker = markerOf(lines[to]);
    if (!marker || marker.kind !== head.kind || isRule(lines[to])) break;
    const item = parseItem(lines, to, marker, depth);
    items.push(item);
    to = item.to;
    let next = to;
    while (next < lines.length && isBlank(lines[next])) next += 1;
    const goes = next < lines.length && markerOf(lines[next])?.kind === head.kind && !isRule(lines[next]);
    tight &&= !item.loose && !(goes && next > to);
    if (goes) to = next;
  }
  return { type: 'list', ordered: head.ordered, first: head.first, tight, items: items.map(({ task, blocks }) => ({ task, blocks })), to };
}

function parseItem(lines, at, marker, depth) {
  const inner = [marker.rest];
  // Models indent by two under "1. " as well, where CommonMark asks for three.
  const belongs = Math.min(marker.content, marker.indent + 2);
  let to = at + 1;
  for (; to < lines.length; to += 1) {
    const line = lines[to];
    if (isBlank(line)) {
      let next = to + 1;
      while (next < lines.length && isBlank(lines[next])) next += 1;
      if (next === lines.length || indentOf(lines[next]) < belongs) break;
      inner.push('');
    } else if (indentOf(line) >= belongs) {
      inner.push(unindent(line, marker.content));
    } else if (isBlank(inner.at(-1)) || markerOf(line) || interrupts(lines, to, depth)) {
      break;
    } else {
      inner.push(line);
    }
  }
  const task = /^\[([ xX])\][ \t]+/.exec(inner[0]);
  if (task) inner[0] = inner[0].slice(task[0].length);
  const blocks = parseLines(inner, depth + 1);
  const loose = blocks.some((block, i) => i > 0 && isBlank(inner[block.from - 1]));
  return { task: task ? task[1] !== ' ' : null, blocks, loose, to };
}

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes('|')) return false;
  const rule = lines[at + 1];
  if (!/^[ \t|:-]*-[ \t|:-]*$/.test(rule) || !rule.includes('|')) return false;
  const columns = cellsOf(rule);
  return columns.every((cell) => /^:?-+:?$/.test(cell)) && columns.length <= COLUMNS_MAX && columns.length === cellsOf(lines[at]).length;
}

function parseTable(lines, at) {
  const head = cellsOf(lines[at]);
  const align = cellsOf(lines[at + 1]).map((cell) => {
    if (cell.endsWith(':')) return cell.startsWith(':') ? 'center' : 'right';
    return cell.startsWith(':') ? 'left' : null;
  });
  const rows = [];
  let to = at + 2;
  for (; to < lines.length && lines[to].includes('|'); to += 1) {
    const cells = cellsOf(lines[to]);
    rows.push(head.map((_, column) => cells[column] ?? ''));
  }
  return { type: 'table', align, head, rows, to };
}

function cellsOf(line) {
  let row = line.trim();
  if (row.startsWith('|')) row = row.slice(1);
  if (row.endsWith('|') && !row.endsWith('\\|')) row = row.slice(0, -1);
  return row.split(/(?<!\\)\|/).map((cell) => cell.replaceAll('\\|', '|').trim());
}

function isBlank(line) {
  return line === undefined || line.trim() === '';
}

/** Columns of white space at the start; a tab fills up to the next fourth column. */
function indentOf(line) {
  let columns = 0;
  for (const char of line) {
    if (char === ' ') columns += 1;
    else if (char === '\t') columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

function unindent(line, columns) {
  const indent = indentOf(line);
  return ' '.repeat(Math.max(indent - columns, 0)) + line.trimStart();
}
