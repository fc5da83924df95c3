// Markdown, level two: the text of a block into a tree of text, strong, em, del, sub, sup, kbd, mark, code, maths, link, note and br. Time grows with the
// length of the text, whatever the text is: what is still open is bounded, and so is the search for a link's end.
import { safeHref } from './links.js';

const OPEN_MAX = 64;
const LABEL_CHARS_MAX = 1000;
const HREF_CHARS_MAX = 4000;
const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', hellip: '…', mdash: '—', ndash: '–', times: '×', rarr: '→', larr: '←', le: '≤', ge: '≥' };
const MATHS_CHARS_MAX = 2000;
/** An amount and words: "5-per-unit and 6". Not "2x + ab". */
const PROSE = /^\d(?:[^\\]*[\da-z.,)])?\s+[a-z]{2}/i;
const NO_NOTES = new Set();
const STYLED = /^<(sub|sup|kbd|mark)>([^]+?)<\/\1>/i;
/** Styles inside of styles. */
const STYLES_MAX = 4;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPECIAL = /[\\`$*_~[!<&\n]|https?:\/\//g;

/**
 * Nodes of `text`: `{ type: 'text' | 'code', text }`, `{ type: 'br' }`, `{ type: 'strong' | 'em' | 'del', children }`,
 * `{ type: 'sub' | 'sup' | 'kbd' | 'mark', children }`, `{ type: 'note', label }` for a label in `notes`,
 * `{ type: 'link', href, children }`, `{ type: 'maths', text, display }`. With `growing`, bold, code and links that are not closed yet are taken as if
 * they were, so that an answer being written does not flicker between marks and style.
 */
export function parseInline(text, { growing = false, links = true, notes = NO_NOTES, depth = 0 } = {}) {
  const scan = { text, at: 0, growing, links, notes, depth, frames: [{ children: [] }], unclosedTicks: new Set() };
  while (scan.at < text.length) step(scan);
  while (scan.frames.length > 1) {
    const frame = scan.frames.at(-1);
    if (growing && frame.char === '*' && frame.count === 2 && frame.children.length) frame.style = 'strong';
    closeTop(scan);
  }
  return scan.frames[0].children;
}

function step(scan) {
  SPECIAL.lastIndex = scan.at;
  const found = SPECIAL.exec(scan.text);
  const next = found ? found.index : scan.text.length;
  if (next > scan.at) {
    put(scan, scan.text.slice(scan.at, next));
    scan.at = next;
    return;
  }
  const char = scan.text[scan.at];
  const took = char === '\\' ? bracketedMaths(scan) || escape(scan)
    : char === '$' ? dollarMaths(scan)
    : char === '`' ? code(scan)
    : char === '*' || char === '_' || char === '~' ? delimiters(scan, char)
    : char === '[' || char === '!' ? note(scan) || link(scan)
    : char === '<' ? angle(scan)
    : char === '&' ? entity(scan)
    : char === '\n' ? lineBreak(scan)
    : bareLink(scan);
  if (!took) {
    put(scan, char);
    scan.at += 1;
  }
}

function top(scan) {
  return scan.frames.at(-1).children;
}

/** Adds text, joined to text before it. */
function put(scan, text) {
  append(top(scan), { type: 'text', text });
}

function append(nodes, node) {
  const last = nodes.at(-1);
  if (node.type === 'text' && last?.type === 'text') nodes[nodes.length - 1] = { type: 'text', text: last.text + node.text };
  else nodes.push(node);
}

function escape(scan) {
  const next = scan.text[scan.at + 1];
  if (next === '\n') top(scan).push({ type: 'br' });
  else if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) put(scan, next);
  else return false;
  scan.at += 2;
  return true;
}

/** `\\(…\\)`, and `\\[…\\]` within a line. */
function bracketedMaths(scan) {
  const open = scan.text[scan.at + 1];
  if (open !== '(' && open !== '[') return false;
  return maths(scan, open === '(' ? '\\)' : '\\]', open === '[');
}

/**
 * `$$…$$` within a line, and `$…$` by pandoc's rules: no space inside of the dollars, no digit after them. Nor are
 * amounts ("$5 or so, or 10$") and shell variables ("$HOME/bin:$PATH", "$src/$dst") formulas; "$n$th" has one.
 */
function dollarMaths(scan) {
  const { text, at } = scan;
  if (text[at + 1] === '$') return maths(scan, '$$', true) || skip(scan, 2);
  if (isSpace(text[at + 1] ?? ' ') || /[\p{L}\p{N}]/u.test(text[at - 1] ?? ' ')) return false;
  const found = /^((?:[^$`\\\n]|\\.)+)\$/.exec(text.slice(at + 1, at + 1 + MATHS_CHARS_MAX));
  if (!found) return false;
  const [whole, source] = found;
  const end = at + 1 + whole.length;
  if (scan.growing && end === text.length) return false; // what follows decides
  const next = text[end] ?? '';
  if (isSpace(source.at(-1)) || /[\dA-Z_{]/.test(next) || PROSE.test(source)) return false;
  if (/\p{L}/u.test(next) && /[/=:.,;+-]$/.test(source)) return false;
  top(scan).push({ type: 'maths', text: source, display: false });
  scan.at = end;
  return true;
}

/** A formula whose marks have two characters. Of one that is still being written, the source is shown as it is. */
function maths(scan, close, display) {
  const from = scan.at + 2;
  const end = scan.text.slice(from, from + MATHS_CHARS_MAX).indexOf(close);
  if (end < 0 && !(scan.growing && scan.text.length - from < MATHS_CHARS_MAX)) return false;
  const source = end < 0 ? scan.text.slice(from) : scan.text.slice(from, from + end);
  if (end >= 0 && !source.trim()) return false;
  if (end < 0) put(scan, scan.text.slice(scan.at));
  else top(scan).push({ type: 'maths', text: source.trim(), display });
  scan.at = end < 0 ? scan.text.length : from + end + close.length;
  return true;
}

function skip(scan, count) {
  put(scan, scan.text.slice(scan.at, scan.at + count));
  scan.at += count;
  return true;
}

/** A newline is a break: in a chat, who writes one means one. Spaces before it go. */
function lineBreak(scan) {
  const last = top(scan).at(-1);
  if (last?.type === 'text') last.text = last.text.trimEnd();
  top(scan).push({ type: 'br' });
  scan.at += 1;
  return true;
}

function code(scan) {
  const ticks = runLength(scan.text, scan.at, '`');
  const from = scan.at + ticks;
  let end = scan.unclosedTicks.has(ticks) ? -1 : closingTicks(scan.text, from, ticks);
  if (end < 0) scan.unclosedTicks.add(ticks);
  if (end < 0 && scan.growing && from < scan.text.length) end = scan.text.length;
  if (end < 0) {
    put(scan, '`'.repeat(ticks));
    scan.at = from;
    return true;
  }
  let text = scan.text.slice(from, end).replaceAll('\n', ' ');
  if (text.startsWith(' ') && text.endsWith(' ') && text.trim()) text = text.slice(1, -1);
  top(scan).push({ type: 'code', text });
  scan.at = Math.min(end + ticks, scan.text.length);
  return true;
}

function closingTicks(text, from, ticks) {
  let at = text.indexOf('`', from);
  while (at >= 0) {
    const run = runLength(text, at, '`');
    if (run === ticks) return at;
    at = text.indexOf('`', at + run);
  }
  return -1;
}

/** A run of `*`, `_` or `~`: closes what it can, then opens a frame if it can. CommonMark's rules for both. */
function delimiters(scan, char) {
  const { text } = scan;
  let count = runLength(text, scan.at, char);
  const before = scan.at === 0 ? ' ' : text[scan.at - 1];
  const after = text[scan.at + count] ?? ' ';
  scan.at += count;
  const left = !isSpace(after) && (!PUNCTUATION.test(after) || isSpace(before) || PUNCTUATION.test(before));
  const right = !isSpace(before) && (!PUNCTUATION.test(before) || isSpace(after) || PUNCTUATION.test(after));
  const opens = left && (char !== '_' || !right || PUNCTUATION.test(before));
  const closes = right && (char !== '_' || !left || PUNCTUATION.test(after));
  if (char === '~' && count !== 2) {
    put(scan, char.repeat(count));
    return true;
  }
  while (closes && count > 0) {
    const opener = findOpener(scan, char, count, opens);
    if (opener < 0) break;
    while (scan.frames.length > opener + 1) closeTop(scan);
    count -= closePair(scan, char, count);
  }
  if (count > 0) {
    if (opens && scan.frames.length <= OPEN_MAX) scan.frames.push({ char, count, run: count, closes, children: [] });
    else put(scan, char.repeat(count));
  }
  return true;
}

function findOpener(scan, char, count, opens) {
  for (let i = scan.frames.length - 1; i > 0; i -= 1) {
    const frame = scan.frames[i];
    if (frame.char !== char) continue;
    const threes = (opens || frame.closes) && (frame.run + count) % 3 === 0 && !(frame.run % 3 === 0 && count % 3 === 0);
    if (!threes || char === '~') return i;
  }
  return -1;
}

/** Wraps the top frame's children in the style that two runs make; returns the marks used up. */
function closePair(scan, char, count) {
  const frame = scan.frames.at(-1);
  const used = frame.count >= 2 && count >= 2 ? 2 : 1;
  const node = { type: char === '~' ? 'del' : used === 2 ? 'strong' : 'em', children: frame.children };
  frame.count -= used;
  if (frame.count > 0) {
    frame.children = [node];
  } else {
    scan.frames.pop();
    top(scan).push(node);
  }
  return used;
}

/** Ends the top frame: its marks become text again, unless it was given a style. */
function closeTop(scan) {
  const frame = scan.frames.pop();
  if (frame.style) {
    top(scan).push({ type: frame.style, children: frame.children });
    return;
  }
  put(scan, frame.char.repeat(frame.count));
  for (const node of frame.children) append(top(scan), node);
}

/** `[label](address)`; an image is a link to it, since the page loads nothing from other hosts. */
function link(scan) {
  const { text } = scan;
  const image = text[scan.at] === '!';
  const open = scan.at + (image ? 1 : 0);
  if (text[open] !== '[' || !scan.links) return false;
  const labelEnd = closingBracket(text, open);
  if (labelEnd < 0 || text[labelEnd + 1] !== '(') return false;
  const label = text.slice(open + 1, labelEnd);
  const target = targetAt(text, labelEnd + 2);
  if (!target) {
    if (!scan.growing || text.slice(labelEnd).includes(')')) return false;
    top(scan).push(...parseInline(label, { links: false })); // the address is still being written
    scan.at = text.length;
    return true;
  }
  const children = parseInline(label || target.address, { links: false });
  const href = safeHref(target.address);
  if (href) top(scan).push({ type: 'link', href, children });
  else put(scan, text.slice(scan.at, target.end));
  scan.at = target.end;
  return true;
}

function closingBracket(text, open) {
  let depth = 0;
  for (let i = open; i < text.length && i - open < LABEL_CHARS_MAX; i += 1) {
    if (text[i] === '\\') i += 1;
    else if (text[i] === '[') depth += 1;
    else if (text[i] === ']' && --depth === 0) return i;
  }
  return -1;
}

function targetAt(text, from) {
  const match = /^\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(from, from + HREF_CHARS_MAX));
  return match && { address: (match[1] ?? match[2]).replace(/\\(?=[!-/:-@[-`{-~])/g, ''), end: from + match[0].length };
}

/** `<https://…>` is a link, `<br>` a break (models put it in tables), a few tags are styles; every other tag is text. */
function angle(scan) {
  if (styled(scan)) return true;
  const rest = scan.text.slice(scan.at, scan.at + HREF_CHARS_MAX);
  const br = /^<br[ \t]*\/?>/i.exec(rest);
  const address = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/i.exec(rest);
  const href = address && scan.links && safeHref(address[1]);
  if (br) top(scan).push({ type: 'br' });
  else if (href) top(scan).push({ type: 'link', href, children: [{ type: 'text', text: address[1] }] });
  else return false;
  scan.at += (br ?? address)[0].length;
  return true;
}

/** `<sub>2</sub>` and its like, with Markdown in it. */
function styled(scan) {
  if (scan.depth >= STYLES_MAX) return false;
  const found = STYLED.exec(scan.text.slice(scan.at, scan.at + LABEL_CHARS_MAX));
  if (!found) return false;
  const { links, notes, depth } = scan;
  top(scan).push({ type: found[1].toLowerCase(), children: parseInline(found[2], { links, notes, depth: depth + 1 }) });
  scan.at += found[0].length;
  return true;
}

/** `[^1]`, where there is such a note: elsewhere it is text, as in an expression. */
function note(scan) {
  const found = /^\[\^([^\]\s]{1,40})\]/.exec(scan.text.slice(scan.at, scan.at + 44));
  if (!found || !scan.notes.has(found[1])) return false;
  top(scan).push({ type: 'note', label: found[1] });
  scan.at += found[0].length;
  return true;
}

function bareLink(scan) {
  const found = /^https?:\/\/[^\s<>"'`*|\\]+/.exec(scan.text.slice(scan.at, scan.at + HREF_CHARS_MAX));
  if (!found || !scan.links) return false;
  let address = found[0].replace(/[.,;:!?…]+$/, '');
  // A bracket that was opened before the address also closes after it.
  while (address.endsWith(')') && address.split(')').length > address.split('(').length) address = address.slice(0, -1);
  const href = safeHref(address);
  if (!href) return false;
  top(scan).push({ type: 'link', href, children: [{ type: 'text', text: address }] });
  scan.at += address.length;
  return true;
}

function entity(scan) {
  const match = /^&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/.exec(scan.text.slice(scan.at, scan.at + 12));
  if (!match) return false;
  const point = match[1] ? Number(match[1]) : Number.parseInt(match[2], 16);
  const text = match[3] ? ENTITIES[match[3]] : point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : undefined;
  if (text === undefined) return false;
  put(scan, text);
  scan.at += match[0].length;
  return true;
}

function runLength(text, from, char) {
  let to = from;
  while (text[to] === char) to += 1;
  return to - from;
}

function isSpace(char) {
  return /\s/.test(char);
}
