// The text of a PDF, page by page. Where lines and spaces are follows from where the characters stand.
import { PdfFont } from './fonts.js';
import { PdfFile, PdfOperator, PdfReader } from './objects.js';

export const PDF_BYTES_MAX = 16 << 20;
const PAGES_MAX = 1000;
const OPERATORS_MAX = 4_000_000;
/** Drawings inside of drawings. */
const FORMS_MAX = 4;
/** A gap of this part of the size of the letters is a space. */
const SPACE = 0.15;

/** The text of the file in `bytes`. Throws an Error that says why there is none; it reads on after the name of the file. */
export async function pdfText(bytes) {
  const file = await PdfFile.open(bytes);
  if (file.isEncrypted) throw new Error('is encrypted: save it without a password first');
  const pages = pagesOf(file);
  const budget = { operators: OPERATORS_MAX };
  const texts = [];
  for (const page of pages) texts.push(await pageText(file, page, budget));
  const text = texts.map((page) => withoutLigatures(page.trim())).filter(Boolean).join('\n\n');
  if (!text) throw new Error('has no text: its pages are probably scanned pictures');
  return text;
}

/** Fonts have letters that are drawn as one: a model reads the letters themselves. */
function withoutLigatures(text) {
  return text.replace(/[\ufb00-\ufb06]/g, (letters) => letters.normalize('NFKC'));
}

function pagesOf(file) {
  const pages = [];
  const seen = new Set();
  const visit = (node, resources) => {
    if (!(node instanceof Map) || seen.has(node) || pages.length >= PAGES_MAX) return;
    seen.add(node);
    const own = node.get('Resources') ?? resources;
    const kids = file.get(node.get('Kids'));
    if (Array.isArray(kids)) kids.forEach((kid) => visit(file.get(kid), own));
    else pages.push({ node, resources: own });
  };
  const all = [...file.objects()].filter((value) => value instanceof Map);
  const ofType = (name) => all.filter((value) => file.get(value.get('Type'))?.name === name);
  for (const catalogue of ofType('Catalog')) visit(file.get(catalogue.get('Pages')));
  if (!pages.length) ofType('Page').forEach((page) => visit(page));
  return pages;
}

async function pageText(file, { node, resources }, budget) {
  const contents = [file.get(node.get('Contents'))].flat();
  const parts = [];
  for (const part of contents) parts.push(await file.unpack(file.get(part)));
  const writer = new LineWriter();
  await run(file, parts.join('\n'), file.get(resources), writer, budget, 0);
  return writer.text;
}

/** Runs the operators of a page, or of a form in it, that place text. */
async function run(file, source, resources, writer, budget, depth) {
  const fonts = new Map();
  const inside = (kind, name) => {
    const table = resources instanceof Map ? file.get(resources.get(kind)) : null;
    return table instanceof Map ? file.get(table.get(name)) : null;
  };
  const fontOf = async (name) => {
    const dictionary = inside('Font', name);
    if (!fonts.has(name)) fonts.set(name, dictionary instanceof Map ? await PdfFont.read(file, dictionary) : null);
    return fonts.get(name);
  };
  const reader = new PdfReader(source);
  let operands = [];
  for (let value = reader.next(); value !== undefined; value = reader.next()) {
    if (!(value instanceof PdfOperator)) {
      if (operands.length < 64) operands.push(value);
      continue;
    }
    if (--budget.operators < 0) throw new Error('has too much on its pages');
    const [a, b] = operands;
    const word = value.word;
    if (word === 'Tf') writer.setFont(await fontOf(a?.name), b);
    else if (word === 'Do') {
      const form = inside('XObject', a?.name);
      if (form instanceof Map && file.get(form.get('Subtype'))?.name === 'Form' && depth < FORMS_MAX) {
        await run(file, await file.unpack(form), file.get(form.get('Resources')) ?? resources, writer, budget, depth + 1);
      }
    } else if (word === 'BI') {
      skipImage(reader);
    } else {
      writer.apply(word, operands);
    }
    operands = [];
  }
}

/** An image within the operators ends with EI; its bytes are no operators. */
function skipImage(reader) {
  const end = /\sEI(?=\s|$)/g;
  end.lastIndex = reader.at;
  reader.at = end.exec(reader.text) ? end.lastIndex : reader.text.length;
}

/** Follows the place of the text, and writes lines and spaces where it moves. Turned text is read as if it were not. */
class LineWriter {
  text = '';
  #font = null;
  #size = 1;
  #scale = [1, 1]; // of the text's matrix: across, down
  #line = [0, 0]; // the start of the line
  #x = 0;
  #leading = 0;
  #end = null; // where the last character ended: x, y, size

  setFont(font, size) {
    this.#font = font;
    this.#size = typeof size === 'number' ? size : 1;
  }

  apply(word, operands) {
    const numbers = operands.map((operand) => (typeof operand === 'number' ? operand : 0));
    switch (word) {
      case 'BT':
        this.#setMatrix([1, 0, 0, 1, 0, 0]);
        break;
      case 'Tm':
        this.#setMatrix(numbers);
        break;
      case 'TL':
        [this.#leading] = numbers;
        break;
      case 'TD':
        this.#leading = -(numbers[1] ?? 0);
        this.#move(...numbers);
        break;
      case 'Td':
        this.#move(...numbers);
        break;
      case 'T*':
        this.#move(0, -this.#leading);
        break;
      case "'":
      case '"':
        this.#move(0, -this.#leading);
        this.#show(operands.at(-1));
        break;
      case 'Tj':
        this.#show(operands[0]);
        break;
      case 'TJ':
        for (const part of Array.isArray(operands[0]) ? operands[0] : []) {
          if (typeof part === 'number') this.#x -= (part / 1000) * this.#size * this.#scale[0];
          else this.#show(part);
        }
        break;
      default:
    }
  }

  #setMatrix([a = 1, b = 0, c = 0, d = 1, e = 0, f = 0]) {
    this.#scale = [Math.hypot(a, b) || 1, Math.hypot(c, d) || 1];
    this.#line = [e, f];
    this.#x = e;
  }

  #move(x = 0, y = 0) {
    this.#line = [this.#line[0] + x * this.#scale[0], this.#line[1] + y * this.#scale[1]];
    [this.#x] = this.#line;
  }

  #show(string) {
    if (typeof string !== 'string' || !this.#font) return;
    for (const { text, width } of this.#font.characters(string)) {
      this.#place(text);
      this.#x += ((typeof width === 'number' ? width : 500) / 1000) * Math.abs(this.#size) * this.#scale[0];
      this.#end = { x: this.#x, y: this.#line[1], size: Math.abs(this.#size) * this.#scale[1] };
    }
  }

  #place(text) {
    if (!text) return;
    const y = this.#line[1];
    if (this.#end) {
      const down = this.#end.y - y;
      const gap = this.#x - this.#end.x;
      const { size } = this.#end;
      if (Math.abs(down) > size * 0.5) this.text = `${this.text.trimEnd()}${Math.abs(down) > size * 1.9 ? '\n\n' : '\n'}`;
      else if ((gap > size * SPACE || gap < -size) && !/\s$/.test(this.text) && text.trim()) this.text += ' ';
    }
    this.text += text.replace(/[\0-\x08\x0b-\x1f\u00ad]/g, '');
  }
}
