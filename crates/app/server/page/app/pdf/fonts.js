// Fonts of a PDF, as far as text needs them: which characters a string stands for, and how wide they are.
import { PdfName, PdfOperator, PdfReader } from './objects.js';

const RANGE_MAX = 0x10000;
/** Names of glyphs that are no letters themselves. */
const GLYPHS = {
  space: ' ', exclam: '!', quotedbl: '"', numbersign: '#', dollar: '$', percent: '%', ampersand: '&', quotesingle: "'", parenleft: '(', parenright: ')',
  asterisk: '*', plus: '+', comma: ',', hyphen: '-', period: '.', slash: '/', zero: '0', one: '1', two: '2', three: '3', four: '4', five: '5', six: '6',
  seven: '7', eight: '8', nine: '9', colon: ':', semicolon: ';', less: '<', equal: '=', greater: '>', question: '?', at: '@', bracketleft: '[',
  backslash: '\\', bracketright: ']', asciicircum: '^', underscore: '_', grave: '`', braceleft: '{', bar: '|', braceright: '}', asciitilde: '~',
  quoteleft: '‘', quoteright: '’', quotedblleft: '“', quotedblright: '”', endash: '–', emdash: '—', bullet: '•', ellipsis: '…', ff: 'ff', fi: 'fi',
  fl: 'fl', ffi: 'ffi', ffl: 'ffl', minus: '−', degree: '°', section: '§', germandbls: 'ß', adieresis: 'ä', odieresis: 'ö', udieresis: 'ü',
  Adieresis: 'Ä', Odieresis: 'Ö', Udieresis: 'Ü', eacute: 'é', egrave: 'è', ecircumflex: 'ê', agrave: 'à', acircumflex: 'â', ccedilla: 'ç', ntilde: 'ñ',
  iacute: 'í', oacute: 'ó', uacute: 'ú', aacute: 'á', ocircumflex: 'ô', Euro: '€',
};

export class PdfFont {
  #twoBytes;
  #toUnicode = null; // code -> text
  #names = new Map(); // code -> text, of simple fonts
  #widths = new Map();
  #otherWidth;

  static async read(file, dictionary) {
    const font = new PdfFont();
    font.#twoBytes = file.get(dictionary.get('Subtype'))?.name === 'Type0';
    const map = file.get(dictionary.get('ToUnicode'));
    if (map instanceof Map) font.#toUnicode = parseMap(await file.unpack(map));
    if (font.#twoBytes) font.#readCidWidths(file, file.get(file.get(dictionary.get('DescendantFonts'))?.[0]));
    else font.#readSimple(file, dictionary);
    return font;
  }

  /** The characters of a string: `{ text, width }` each, the width in thousandths of the size. */
  *characters(string) {
    const step = this.#twoBytes ? 2 : 1;
    for (let at = 0; at + step <= string.length; at += step) {
      const code = step === 2 ? string.charCodeAt(at) * 256 + string.charCodeAt(at + 1) : string.charCodeAt(at);
      yield { text: this.#textOf(code), width: this.#widths.get(code) ?? this.#otherWidth };
    }
  }

  #textOf(code) {
    const mapped = this.#toUnicode?.get(code) ?? this.#names.get(code);
    if (mapped !== undefined) return mapped;
    return this.#twoBytes ? '' : windows1252.decode(Uint8Array.of(code));
  }

  #readSimple(file, dictionary) {
    const encoding = file.get(dictionary.get('Encoding'));
    let code = 0;
    for (const item of (encoding instanceof Map && file.get(encoding.get('Differences'))) || []) {
      if (typeof item === 'number') code = item;
      else if (item instanceof PdfName) {
        const text = glyphText(item.name);
        if (text !== undefined) this.#names.set(code, text);
        code += 1;
      }
    }
    const first = file.get(dictionary.get('FirstChar')) ?? 0;
    (file.get(dictionary.get('Widths')) ?? []).forEach((width, i) => this.#widths.set(first + i, file.get(width)));
    this.#otherWidth = 500;
  }

  /** `[first [w w …] first last w …]` */
  #readCidWidths(file, descendant) {
    this.#otherWidth = 1000;
    if (!(descendant instanceof Map)) return;
    this.#otherWidth = file.get(descendant.get('DW')) ?? 1000;
    const list = (file.get(descendant.get('W')) ?? []).map((item) => file.get(item));
    for (let at = 0; at + 1 < list.length;) {
      const first = list[at];
      if (Array.isArray(list[at + 1])) {
        list[at + 1].forEach((width, i) => this.#widths.set(first + i, width));
        at += 2;
      } else {
        const last = Math.min(list[at + 1], first + RANGE_MAX);
        for (let code = first; code <= last; code += 1) this.#widths.set(code, list[at + 2]);
        at += 3;
      }
    }
  }
}

const windows1252 = new TextDecoder('windows-1252');

function glyphText(name) {
  if (name.length === 1) return name;
  const hex = /^uni([\dA-F]{4})/.exec(name) ?? /^u([\dA-F]{4,6})$/.exec(name);
  return hex ? fromPoint(Number.parseInt(hex[1], 16)) : GLYPHS[name];
}

function fromPoint(point) {
  return point <= 0x10ffff ? String.fromCodePoint(point) : '';
}

/** The `bfchar` and `bfrange` parts of a ToUnicode map. */
function parseMap(text) {
  const map = new Map();
  const reader = new PdfReader(text);
  let operands = [];
  for (let value = reader.next(); value !== undefined && map.size < RANGE_MAX; value = reader.next()) {
    if (!(value instanceof PdfOperator)) {
      operands.push(value);
      continue;
    }
    if (value.word === 'endbfchar') {
      for (let i = 0; i + 1 < operands.length; i += 2) map.set(codeOf(operands[i]), utf16(operands[i + 1]));
    } else if (value.word === 'endbfrange') {
      for (let i = 0; i + 2 < operands.length; i += 3) addRange(map, codeOf(operands[i]), codeOf(operands[i + 1]), operands[i + 2]);
    }
    operands = [];
  }
  return map;
}

function addRange(map, first, last, target) {
  for (let code = first; code <= last && code - first < RANGE_MAX && map.size < RANGE_MAX; code += 1) {
    if (Array.isArray(target)) map.set(code, utf16(target[code - first] ?? ''));
    else if (typeof target === 'string') {
      const text = utf16(target);
      const point = text.codePointAt(text.length - 1) ?? 0;
      map.set(code, text.slice(0, -1) + fromPoint(point + code - first));
    }
  }
}

function codeOf(string) {
  let code = 0;
  for (const char of typeof string === 'string' ? string.slice(0, 4) : '') code = code * 256 + char.charCodeAt(0);
  return code;
}

function utf16(bytes) {
  let text = '';
  for (let i = 0; i + 1 < bytes.length; i += 2) text += String.fromCharCode(bytes.charCodeAt(i) * 256 + bytes.charCodeAt(i + 1));
  return text;
}
