// The objects of a PDF file: values, references and streams. Objects are found by their `obj` marks, not by the file's table, so
// a damaged table does no harm. Reads text and numbers as the format writes them; nothing here knows pages.

const DEPTH_MAX = 40;
const OBJECTS_MAX = 200_000;
/** Of all streams that are unpacked. */
const UNPACKED_BYTES_MAX = 64 << 20;

/** A name such as /Type, told apart from a text. */
export class PdfName {
  constructor(name) {
    this.name = name;
  }
}

/** `12 0 R`: the object with this number. */
class PdfReference {
  constructor(number) {
    this.number = number;
  }
}

/** A word that is no value: an operator of a page, or `stream`. */
export class PdfOperator {
  constructor(word) {
    this.word = word;
  }
}

/** Reads values from `text`, in which each character is a byte. */
export class PdfReader {
  constructor(text, at = 0) {
    this.text = text;
    this.at = at;
  }

  /** The next value: number, string (bytes as characters), PdfName, array, Map, reference, operator; undefined at the end. */
  next(depth = 0) {
    if (depth > DEPTH_MAX) throw new Error('values are nested too deep');
    this.#skipSpace();
    const { text } = this;
    const char = text[this.at];
    if (char === undefined) return undefined;
    if (char === '/') return this.#name();
    if (char === '(') return this.#literal();
    if (char === '<') return text[this.at + 1] === '<' ? this.#dictionary(depth) : this.#hex();
    if (char === '[') return this.#array(depth);
    if (/[\d+.-]/.test(char)) return this.#number();
    if (']>){}'.includes(char)) {
      this.at += text.startsWith('>>', this.at) ? 2 : 1;
      return new PdfOperator(char === '>' ? '>>' : char);
    }
    const [word] = this.#match(/[^\s()<>[\]{}/%]+/y) ?? [text[this.at++]];
    if (word === 'true' || word === 'false') return word === 'true';
    return word === 'null' ? null : new PdfOperator(word);
  }

  #skipSpace() {
    this.#match(/(?:[\s\0]|%[^\r\n]*)+/y);
  }

  #match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  #name() {
    const [, name] = this.#match(/\/([^\s\0()<>[\]{}/%]*)/y);
    return new PdfName(name.replace(/#([\da-fA-F]{2})/g, (_, code) => String.fromCharCode(Number.parseInt(code, 16))));
  }

  #number() {
    const reference = this.#match(/(\d{1,10})\s+\d{1,5}\s+R(?![\w.])/y);
    if (reference) return new PdfReference(Number(reference[1]));
    const [word] = this.#match(/[+-]?[\d.]*[\d.-]*/y);
    if (word) return Number.parseFloat(word) || 0;
    this.at += 1;
    return 0;
  }

  #literal() {
    let depth = 0;
    let value = '';
    for (this.at += 1; this.at < this.text.length; this.at += 1) {
      const char = this.text[this.at];
      if (char === '\\') value += this.#escape();
      else if (char === ')' && depth === 0) break;
      else {
        depth += char === '(' ? 1 : char === ')' ? -1 : 0;
        value += char;
      }
    }
    this.at += 1;
    return value;
  }

  /** At a backslash; leaves `at` on the last character of what it stands for. */
  #escape() {
    const octal = /\\([0-7]{1,3})/y;
    octal.lastIndex = this.at;
    const found = octal.exec(this.text);
    if (found) {
      this.at = octal.lastIndex - 1;
      return String.fromCharCode(Number.parseInt(found[1], 8) & 0xff);
    }
    this.at += 1;
    const char = this.text[this.at] ?? '';
    if (char === '\r' && this.text[this.at + 1] === '\n') this.at += 1;
    return char === '\r' || char === '\n' ? '' : ({ n: '\n', r: '\r', t: '\t', b: '\b', f: '\f' }[char] ?? char);
  }

  #hex() {
    const [, digits] = this.#match(/<([^>]*)>?/y);
    const clean = digits.replace(/[^\da-fA-F]/g, '');
    let value = '';
    for (let i = 0; i < clean.length; i += 2) value += String.fromCharCode(Number.parseInt(clean.slice(i, i + 2).padEnd(2, '0'), 16));
    return value;
  }

  #array(depth) {
    this.at += 1;
    const items = [];
    for (;;) {
      const item = this.next(depth + 1);
      if (item === undefined || (item instanceof PdfOperator && item.word === ']')) return items;
      items.push(item);
    }
  }

  #dictionary(depth) {
    this.at += 2;
    const entries = new Map();
    for (;;) {
      const key = this.next(depth + 1);
      if (!(key instanceof PdfName)) return entries; // its end, or damaged
      entries.set(key.name, this.next(depth + 1));
    }
  }
}

/** A file whose objects are asked for by reference. */
export class PdfFile {
  #text;
  #offsets = new Map(); // number -> where its value begins
  #packed = new Map(); // number -> value, of objects in streams
  #values = new Map();
  #unpackedBytes = 0;

  /** Throws an Error if the bytes are no PDF. */
  static async open(bytes) {
    const file = new PdfFile();
    file.#text = latin1(bytes);
    if (!file.#text.slice(0, 1024).includes('%PDF-')) throw new Error('is not a PDF');
    for (const { 1: number, 0: mark, index } of file.#text.matchAll(/(?<!\d)(\d{1,10})\s+\d{1,5}\s+obj\b/g)) {
      if (file.#offsets.size >= OBJECTS_MAX) break;
      file.#offsets.set(Number(number), index + mark.length);
    }
    await file.#openPacked();
    return file;
  }

  get isEncrypted() {
    return /\/Encrypt\s+(?:\d+\s+\d+\s+R|<<)/.test(this.#text);
  }

  /** All objects, as they are found. */
  *objects() {
    for (const number of new Set([...this.#offsets.keys(), ...this.#packed.keys()])) yield this.get(new PdfReference(number));
  }

  /** The value itself, or the object that it refers to. */
  get(value, depth = 0) {
    if (!(value instanceof PdfReference)) return value;
    if (depth > DEPTH_MAX) return null;
    if (!this.#values.has(value.number)) this.#values.set(value.number, this.#read(value.number));
    return this.get(this.#values.get(value.number), depth + 1);
  }

  /** The bytes of a stream as characters; empty if it is packed in a way that texts are not. */
  async unpack(stream) {
    if (!(stream instanceof Map) || stream.start === undefined) return '';
    const filters = [this.get(stream.get('Filter')) ?? []].flat().map((filter) => this.get(filter)?.name);
    const length = this.get(stream.get('Length'));
    const told = Number.isInteger(length) && /^\s*endstream/.test(this.#text.slice(stream.start + length, stream.start + length + 20));
    const end = told ? stream.start + length : this.#text.indexOf('endstream', stream.start);
    let text = this.#text.slice(stream.start, end < 0 ? undefined : end);
    for (const filter of filters) {
      if (filter === 'ASCII85Decode' || filter === 'A85') text = ascii85(text);
      else if (filter === 'FlateDecode' || filter === 'Fl') text = await this.#inflate(text);
      else return '';
    }
    return text;
  }

  #read(number) {
    if (this.#packed.has(number)) return this.#packed.get(number);
    if (!this.#offsets.has(number)) return null;
    const reader = new PdfReader(this.#text, this.#offsets.get(number));
    const value = reader.next();
    if (value instanceof Map) {
      const begin = /\s*stream(?:\r\n|\n|\r)/y;
      begin.lastIndex = reader.at;
      if (begin.test(this.#text)) value.start = begin.lastIndex;
    }
    return value;
  }

  /** Reads objects that are in streams of objects. */
  async #openPacked() {
    for (const number of [...this.#offsets.keys()]) {
      const stream = this.#isPacked(number) ? this.get(new PdfReference(number)) : null;
      if (!(stream instanceof Map) || stream.get('Type')?.name !== 'ObjStm') continue;
      const text = await this.unpack(stream);
      const head = new PdfReader(text);
      const first = this.get(stream.get('First')) ?? 0;
      const count = Math.min(this.get(stream.get('N')) ?? 0, OBJECTS_MAX - this.#packed.size);
      for (let i = 0; i < count; i += 1) {
        const [packed, offset] = [head.next(), head.next()];
        if (!Number.isInteger(packed) || !Number.isInteger(offset)) break;
        if (!this.#offsets.has(packed)) this.#packed.set(packed, new PdfReader(text, first + offset).next());
      }
    }
  }

  #isPacked(number) {
    const at = this.#offsets.get(number);
    return this.#text.slice(at, at + 400).includes('/ObjStm');
  }

  async #inflate(text) {
    const bytes = Uint8Array.from(text, (char) => char.charCodeAt(0));
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate')).getReader();
    const parts = [];
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        this.#unpackedBytes += value.length;
        if (this.#unpackedBytes > UNPACKED_BYTES_MAX) throw new RangeError('is too large when it is unpacked');
        parts.push(latin1(value));
      }
    } catch (error) {
      if (error instanceof RangeError) throw error;
      // Bytes after the end, or a stream that is cut off: what came before is used.
    }
    return parts.join('');
  }
}

/** Five characters from `!` to `u` are four bytes; `z` is four zeros. */
function ascii85(text) {
  const parts = [];
  let group = [];
  const end = () => {
    let value = 0;
    for (let i = 0; i < 5; i += 1) value = value * 85 + (group[i] ?? 84);
    for (let i = 0; i < group.length - 1; i += 1) parts.push(String.fromCharCode(Math.floor(value / 256 ** (3 - i)) & 0xff));
    group = [];
  };
  for (const char of text) {
    if (char === '~') break;
    if (char === 'z' && !group.length) parts.push('\0\0\0\0');
    else if (char >= '!' && char <= 'u') group.push(char.charCodeAt(0) - 33);
    if (group.length === 5) end();
  }
  if (group.length > 1) end();
  return parts.join('');
}

function latin1(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; at += 8192) parts.push(String.fromCharCode(...bytes.subarray(at, at + 8192)));
  return parts.join('');
}
