// Colour for code: comments, strings, numbers and common words, told apart by one expression per family of languages.
// A guide for the eye and no more; the text of the code is never changed.
import { h } from '../dom.js';

const CODE_CHARS_MAX = 50_000;

const FAMILIES = {
  slash: 'c cc cpp c++ cs csharp cuda dart go h hpp java javascript js json jsonc jsx kotlin php protobuf rs rust scala swift ts tsx typescript wgsl zig',
  hash: 'bash dockerfile elixir julia make makefile nix perl py python r rb ruby sh shell toml yaml yml zsh',
  dash: 'haskell hs lua sql',
};
const COMMENTS = {
  slash: String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`,
  hash: String.raw`(?<![^\s;])#[^\n]*`,
  dash: String.raw`--[^\n]*`,
};
const STRINGS = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\x60(?:[^\x60\\]|\\[^])*\x60`;
const NUMBERS = String.raw`\b\d[\w.]*`;
const WORDS = `and as async await begin bool boolean break by case catch char class const continue create def default defer del delete do done
  double echo elif else elsif end enum esac except export extends false fi final finally float fn for foreach from func function go group if impl
  implements import in insert int interface into is join lambda let limit local loop long match mod move mut new nil None not null of on or order
  package pass private protected pub public raise ref return select self Self set static str String struct super switch table then this throw
  trait True False true try type typeof u8 u32 u64 i32 i64 f32 f64 unless until update use using usize values var void where while with yield
  SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT ON GROUP ORDER BY LIMIT AND OR NOT NULL AS`.split(/\s+/);

/** Languages that are not made of words, strings and comments as the families are. */
const OTHERS = {
  'diff patch': /(?<comment>^(?:diff |index |--- |\+\+\+ |new file|deleted file|rename |similarity )[^\n]*)|(?<word>^@@[^\n]*)|(?<added>^\+[^\n]*)|(?<removed>^-[^\n]*)/gm,
  'html htm xml svg vue xhtml': /(?<comment><!--[^]*?(?:-->|$))|(?<word><[/!?]?[A-Za-z][\w:.-]*|[/?]?>)|(?<number>(?<=\s)[\w:@.-]+(?==))|(?<string>(?<==)(?:"[^"]*"|'[^']*'))/g,
  'css scss less': /(?<comment>\/\*[^]*?(?:\*\/|$))|(?<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?<number>#[\da-fA-F]{3,8}\b|(?<![\w-])-?\d[\d.]*(?:[a-z%]+)?)|(?<word>@[\w-]+|[\w-]+(?=\s*:[^:{]*[;}]))/g,
};

const patterns = new Map();

/** Pieces of `text` for a code element: strings, and spans where there is colour. */
export function highlighted(text, language) {
  const pattern = patternOf(language.toLowerCase());
  if (!pattern || text.length > CODE_CHARS_MAX) return [text];
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    const [kind] = Object.entries(match.groups).find(([, part]) => part !== undefined);
    pieces.push(text.slice(at, match.index), h('span', { class: `code-${kind}` }, match[0]));
    at = match.index + match[0].length;
  }
  pieces.push(text.slice(at));
  return pieces;
}

function patternOf(language) {
  const other = Object.keys(OTHERS).find((names) => names.split(' ').includes(language));
  if (other) return OTHERS[other];
  const family = Object.keys(FAMILIES).find((name) => FAMILIES[name].split(' ').includes(language));
  if (!family) return null;
  if (!patterns.has(family)) {
    const source = `(?<comment>${COMMENTS[family]})|(?<string>${STRINGS})|(?<number>${NUMBERS})|(?<word>\\b(?:${WORDS.join('|')})\\b)`;
    patterns.set(family, new RegExp(source, 'g'));
  }
  return patterns.get(family);
}
