// QR codes: bytes into squares, with error correction M, in versions 1 to 10 (213 bytes at most). ISO/IEC 18004.

/** For each version from 1 on: bytes in all, bytes of error correction in a block, blocks, places of the alignment patterns. */
const VERSIONS = [
  [26, 10, 1, []], [44, 16, 1, [6, 18]], [70, 26, 1, [6, 22]], [100, 18, 2, [6, 26]], [134, 24, 2, [6, 30]],
  [172, 16, 4, [6, 34]], [196, 18, 4, [6, 22, 38]], [242, 22, 4, [6, 24, 42]], [292, 22, 5, [6, 26, 46]], [346, 26, 5, [6, 28, 50]],
];
const MASKS = [
  (x, y) => (x + y) % 2 === 0, (x, y) => y % 2 === 0, (x) => x % 3 === 0, (x, y) => (x + y) % 3 === 0,
  (x, y) => (Math.floor(x / 3) + Math.floor(y / 2)) % 2 === 0, (x, y) => ((x * y) % 2) + ((x * y) % 3) === 0,
  (x, y) => (((x * y) % 2) + ((x * y) % 3)) % 2 === 0, (x, y) => (((x + y) % 2) + ((x * y) % 3)) % 2 === 0,
];

/** Rows of squares, true where one is dark; null if the text is too long. */
export function qrCode(text) {
  const bytes = new TextEncoder().encode(text);
  const version = 1 + VERSIONS.findIndex((_, index) => bytes.length <= capacity(index + 1));
  if (!version) return null;
  const words = interleaved(version, dataWords(version, bytes));
  const drawn = MASKS.map((_, mask) => draw(version, words, mask));
  return drawn.reduce((best, grid) => (penalty(grid) < penalty(best) ? grid : best));
}

/** Bytes of text that fit: without the mode, the length and the error correction. */
function capacity(version) {
  return dataLength(version) - (version < 10 ? 2 : 3);
}

function dataLength(version) {
  const [all, correction, blocks] = VERSIONS[version - 1];
  return all - correction * blocks;
}

/** The mode, the length, the bytes, an end, and words that fill up. */
function dataWords(version, bytes) {
  const bits = [];
  const put = (value, count) => {
    for (let bit = count - 1; bit >= 0; bit -= 1) bits.push((value >> bit) & 1);
  };
  put(4, 4);
  put(bytes.length, version < 10 ? 8 : 16);
  for (const byte of bytes) put(byte, 8);
  const length = dataLength(version);
  put(0, Math.min(4, length * 8 - bits.length));
  while (bits.length % 8) bits.push(0);
  const words = [];
  for (let at = 0; at < bits.length; at += 8) words.push(bits.slice(at, at + 8).reduce((word, bit) => word * 2 + bit, 0));
  for (let fill = 0xec; words.length < length; fill ^= 0xec ^ 0x11) words.push(fill);
  return words;
}

/** The blocks' words in turn, then those of their error correction. Later blocks may be longer by one. */
function interleaved(version, words) {
  const [, correction, count] = VERSIONS[version - 1];
  const short = Math.floor(words.length / count);
  const blocks = [];
  for (let at = 0, i = 0; i < count; i += 1) {
    const end = at + short + (i >= count - (words.length % count) ? 1 : 0);
    blocks.push(words.slice(at, end));
    at = end;
  }
  const checks = blocks.map((block) => remainder(block, correction));
  const inTurn = (lists, length) => Array.from({ length }, (_, i) => lists.flatMap((list) => (i < list.length ? [list[i]] : []))).flat();
  return [...inTurn(blocks, short + 1), ...inTurn(checks, correction)];
}

/** The Reed–Solomon remainder of a block. */
function remainder(block, length) {
  const divisor = [...Array(length - 1).fill(0), 1];
  for (let i = 0, root = 1; i < length; i += 1, root = times(root, 2)) {
    for (let j = 0; j < length; j += 1) divisor[j] = times(divisor[j], root) ^ (divisor[j + 1] ?? 0);
  }
  const rest = Array(length).fill(0);
  for (const word of block) {
    const factor = word ^ rest.shift();
    rest.push(0);
    divisor.forEach((value, i) => {
      rest[i] ^= times(value, factor);
    });
  }
  return rest;
}

/** The product in the field of 256 elements. */
function times(a, b) {
  let product = 0;
  for (let bit = 7; bit >= 0; bit -= 1) product = (product << 1) ^ ((product >> 7) * 0x11d) ^ (((b >> bit) & 1) * a);
  return product;
}

function draw(version, words, mask) {
  const size = 17 + version * 4;
  const grid = Array.from({ length: size }, () => Array(size).fill(false));
  const fixed = Array.from({ length: size }, () => Array(size).fill(false));
  const set = (x, y, dark) => {
    grid[y][x] = dark;
    fixed[y][x] = true;
  };
  drawPatterns(version, size, set, fixed);
  drawFormat(size, mask, set);
  if (version >= 7) drawVersion(version, size, set);
  let at = 0;
  for (let right = size - 1; right > 0; right -= 2) {
    if (right === 6) right = 5;
    for (let step = 0; step < size; step += 1) {
      for (const x of [right, right - 1]) {
        const y = ((right + 1) & 2) === 0 ? size - 1 - step : step;
        if (fixed[y][x]) continue;
        const bit = at < words.length * 8 && ((words[at >> 3] >> (7 - (at & 7))) & 1) === 1;
        grid[y][x] = bit !== MASKS[mask](x, y);
        at += 1;
      }
    }
  }
  return grid;
}

function drawPatterns(version, size, set, fixed) {
  for (let i = 0; i < size; i += 1) {
    set(6, i, i % 2 === 0);
    set(i, 6, i % 2 === 0);
  }
  for (const [left, top] of [[3, 3], [size - 4, 3], [3, size - 4]]) {
    for (let dy = -4; dy <= 4; dy += 1) {
      for (let dx = -4; dx <= 4; dx += 1) {
        const ring = Math.max(Math.abs(dx), Math.abs(dy));
        const [x, y] = [left + dx, top + dy];
        if (x >= 0 && y >= 0 && x < size && y < size) set(x, y, ring !== 2 && ring !== 4);
      }
    }
  }
  const places = VERSIONS[version - 1][3];
  for (const x of places) {
    for (const y of places) {
      if (fixed[y][x] && (x !== 6 || y === 6) && (y !== 6 || x === 6)) continue; // a corner
      if ((x === 6 && y >= size - 8) || (y === 6 && x >= size - 8)) continue;
      for (let dy = -2; dy <= 2; dy += 1) {
        for (let dx = -2; dx <= 2; dx += 1) set(x + dx, y + dy, Math.max(Math.abs(dx), Math.abs(dy)) !== 1);
      }
    }
  }
}

/** Error correction M is 0; the mask follows. Twice, and one dark square. */
function drawFormat(size, mask, set) {
  let rest = mask;
  for (let i = 0; i < 10; i += 1) rest = (rest << 1) ^ ((rest >> 9) * 0x537);
  const bits = ((mask << 10) | rest) ^ 0x5412;
  const bit = (i) => ((bits >> i) & 1) === 1;
  for (let i = 0; i < 15; i += 1) {
    set(i < 8 ? size - 1 - i : [7, 5, 4, 3, 2, 1, 0][i - 8], 8, bit(i));
    set(8, i < 6 ? i : i < 8 ? i + 1 : size - 15 + i, bit(i));
  }
  set(8, size - 8, true);
}

function drawVersion(version, size, set) {
  let rest = version;
  for (let i = 0; i < 12; i += 1) rest = (rest << 1) ^ ((rest >> 11) * 0x1f25);
  const bits = (version << 12) | rest;
  for (let i = 0; i < 18; i += 1) {
    const dark = ((bits >> i) & 1) === 1;
    const [a, b] = [size - 11 + (i % 3), Math.floor(i / 3)];
    set(a, b, dark);
    set(b, a, dark);
  }
}

/** How hard a grid is to read: runs, blocks, what looks like a corner, and too much of one colour. */
function penalty(grid) {
  const size = grid.length;
  const columns = grid.map((_, x) => grid.map((row) => row[x]));
  let sum = 0;
  for (const line of [...grid, ...columns]) {
    const text = line.map((dark) => (dark ? '1' : '0')).join('');
    for (const [run] of text.matchAll(/0{5,}|1{5,}/g)) sum += run.length - 2;
    sum += 40 * [...text.matchAll(/(?=00001011101|10111010000)/g)].length;
  }
  for (let y = 1; y < size; y += 1) {
    for (let x = 1; x < size; x += 1) {
      const dark = grid[y][x];
      if (grid[y - 1][x] === dark && grid[y][x - 1] === dark && grid[y - 1][x - 1] === dark) sum += 3;
    }
  }
  const dark = grid.flat().filter(Boolean).length / (size * size);
  return sum + 10 * Math.floor(Math.abs(dark * 100 - 50) / 5);
}
