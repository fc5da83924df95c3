//! bf16 weights in twelve bits, with nothing lost.
//!
//! The high byte of a bf16 number is its sign and all of its exponent but the last bit. The weights of a panel have few exponents in common use:
//! eight such seven-bit *powers* cover all but some of ten thousand. So a weight is its low byte and a *code* of four bits, its
//! sign and which of its panel's eight powers it has. Generated tokens take as long as their weights take to arrive, and a
//! quarter fewer bytes arrive sooner.
//!
//! A panel begins with a line whose first 16 bytes are the high bytes that codes stand for. Then come, for every *quarter* of a group
//! (8 inputs of 16 features), a line of codes and two of low bytes, in an order that lets vectors interleave high and low bytes to the
//! four lines of [`Format::Bf16`](super::matrix::Format): byte `16 l + 8 i + w` of low bytes `h` is that of word `8 l + w` of line
//! `2 h + i`, and its code is in the low (`h = 0`) or high nibble of the same byte of the codes. A quarter with a weight that has none of
//! the eight powers is *uncommon*: its high bytes lie in full beside the panels.

use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

use super::matrix::{GROUP, LINE, PANEL};
use super::memory::Aligned;
use crate::BackendError;

pub(crate) const QUARTERS_PER_GROUP: usize = 4;
/// Bytes of a quarter, plain and packed, and of its high bytes in full.
pub(crate) const PLAIN: usize = GROUP / QUARTERS_PER_GROUP * PANEL * 2;
pub(crate) const PACKED: usize = 3 * LINE;
pub(crate) const HIGHS: usize = 2 * LINE;
/// Bytes before the first quarter of a panel.
pub(crate) const HEAD: usize = LINE;
/// Powers of a panel.
const POWERS: usize = 8;
/// Of a high byte.
const SIGN: u8 = 0x80;
/// Stands for all other powers while a quarter is packed.
const NO_CODE: u8 = 0x40;
/// One in so many quarters of a sample may be uncommon if its weights are to be worth packing, and so many in all when they are packed.
const UNCOMMON_SAMPLED: usize = 8;
const UNCOMMON_MOST: usize = 4;

/// Bytes of a packed panel.
pub(crate) fn stride(cols: usize) -> usize {
    HEAD + cols.div_ceil(GROUP) * QUARTERS_PER_GROUP * PACKED
}

/// The quarters that hold uncommon powers, of all panels one after the other.
pub(crate) struct Uncommon {
    /// For each panel how many come before it.
    starts: Vec<u32>,
    /// Which ones, counted through all panels; then one that never comes.
    quarters: Vec<u32>,
    /// High bytes, in the order of the low ones.
    highs: Aligned<u8>,
}

/// Uncommon quarters in the order in which panels happen to be packed.
pub(crate) struct Found {
    /// More than these are not worth keeping.
    most: usize,
    quarters: Mutex<Vec<(u32, [u8; HIGHS])>>,
}

impl Found {
    /// For so many panels of which all are packed.
    pub(crate) fn in_all(panels: usize, cols: usize) -> Self {
        Self { most: first(panels, cols) / UNCOMMON_MOST, quarters: Mutex::default() }
    }

    /// For so many panels that stand for others.
    pub(crate) fn in_sample(panels: usize, cols: usize) -> Self {
        Self { most: first(panels, cols) / UNCOMMON_SAMPLED, quarters: Mutex::default() }
    }

    fn add(&self, uncommon: &mut Vec<(u32, [u8; HIGHS])>) {
        let mut quarters = self.quarters.lock().unwrap_or_else(PoisonError::into_inner);
        if quarters.len() <= self.most {
            quarters.append(uncommon);
        }
    }

    pub(crate) fn are_few(&self) -> bool {
        self.quarters.lock().unwrap_or_else(PoisonError::into_inner).len() <= self.most
    }

    pub(crate) fn sorted(self, panels: usize, cols: usize) -> Result<Uncommon, BackendError> {
        let mut found = self.quarters.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.sort_unstable_by_key(|&(quarter, _)| quarter);
        let mut highs = Aligned::zeroed("weights", found.len() * HIGHS)?;
        for (out, (_, bytes)) in highs.chunks_exact_mut(HIGHS).zip(&found) {
            out.copy_from_slice(bytes);
        }
        let before =
            |panel: usize| found.partition_point(|&(quarter, _)| (quarter as usize) < first(panel, cols)) as u32;
        let starts = (0..panels).map(before).collect();
        let quarters = found.iter().map(|&(quarter, _)| quarter).chain([u32::MAX]).collect();
        Ok(Uncommon { starts, quarters, highs })
    }
}

/// The first quarter of a panel, counted through all.
pub(crate) fn first(panel: usize, cols: usize) -> usize {
    panel * cols.div_ceil(GROUP) * QUARTERS_PER_GROUP
}

impl Uncommon {
    pub(crate) fn bytes(&self) -> usize {
        size_of::<u32>() * (self.starts.len() + self.quarters.len()) + self.highs.len()
    }

    /// Those of a panel and of the ones after it: their numbers, and the high bytes of each.
    pub(crate) fn from(&self, panel: usize) -> (&[u32], &[u8]) {
        let start = self.starts[panel] as usize;
        (&self.quarters[start..], &self.highs[start * HIGHS..])
    }
}

/// The powers that most weights of a plain panel have, as far as every fourth quarter tells.
fn powers(plain: &[u8]) -> [u8; POWERS] {
    // Two tables: an increment need not wait for the one before it.
    let mut counts = [[0u32; 128]; 2];
    for words in plain.chunks_exact(PLAIN).step_by(4).flat_map(|quarter| quarter.chunks_exact(4)) {
        counts[0][usize::from(words[1] & 0x7f)] += 1;
        counts[1][usize::from(words[3] & 0x7f)] += 1;
    }
    let mut by_count: [u8; 128] = std::array::from_fn(|power| power as u8);
    by_count.sort_unstable_by_key(|&power| {
        let count = counts.iter().map(|count| count[usize::from(power)]).sum::<u32>();
        (Reverse(count), power)
    });
    std::array::from_fn(|i| by_count[i])
}

/// Packs a plain panel, which is number `panel`.
#[inline(always)]
pub(crate) fn pack(plain: &[u8], out: &mut [u8], panel: usize, cols: usize, found: &Found) {
    let powers = powers(plain);
    let (head, packed) = out.split_at_mut(HEAD);
    for (code, out) in head[..2 * POWERS].iter_mut().enumerate() {
        *out = powers[code % POWERS] | if code < POWERS { 0 } else { SIGN };
    }
    let mut uncommon = Vec::new();
    for (index, (plain, packed)) in plain.chunks_exact(PLAIN).zip(packed.chunks_exact_mut(PACKED)).enumerate() {
        let (nibbles, lows) = packed.split_at_mut(LINE);
        let (mut highs, mut codes) = ([0u8; HIGHS], [0u8; HIGHS]);
        for (at, words) in plain.chunks_exact(16).enumerate() {
            // Lane `at % 4` of line `at / 4`.
            let to = at / 8 * LINE + at % 4 * 16 + at / 4 % 2 * 8;
            for i in 0..8 {
                (lows[to + i], highs[to + i]) = (words[2 * i], words[2 * i + 1]);
            }
        }
        let mut have_none = 0;
        for (code, high) in codes.iter_mut().zip(highs) {
            *code = NO_CODE;
            for (i, power) in powers.into_iter().enumerate() {
                *code = if high & !SIGN == power { i as u8 } else { *code };
            }
            have_none |= *code;
            *code |= (high & SIGN) >> 4;
        }
        for at in 0..LINE {
            nibbles[at] = codes[at] & 15 | codes[LINE + at] << 4;
        }
        if have_none & NO_CODE != 0 {
            uncommon.push(((first(panel, cols) + index) as u32, highs));
        }
    }
    if !uncommon.is_empty() {
        found.add(&mut uncommon);
    }
}

/// What uncommon quarters take at most in panels like those of a sample that is worth packing.
pub(crate) fn uncommon_bytes_max(panels: usize, cols: usize) -> usize {
    first(panels, cols) / UNCOMMON_SAMPLED * (HIGHS + size_of::<u32>()) + (panels + 1) * size_of::<u32>()
}

/// One feature of a packed panel as numbers: the definition of what it means.
pub(crate) fn unpack_feature(panel: &[u8], first: usize, uncommon: (&[u32], &[u8]), feature: usize, out: &mut [f32]) {
    let (head, quarters) = panel.split_at(HEAD);
    let (mut numbers, mut highs) = uncommon;
    let mut quarters = quarters.chunks_exact(PACKED).enumerate();
    for values in out.chunks_mut(PLAIN / PANEL / 2) {
        let (index, packed) = quarters.next().expect("a quarter for each eight inputs");
        let is_uncommon = numbers[0] as usize == first + index;
        for (k, value) in values.iter_mut().enumerate() {
            let (half, at) = (k / 4, feature / 4 * 16 + k / 2 % 2 * 8 + feature % 4 * 2 + k % 2);
            let code = packed[at] >> (4 * half) & 15;
            let high = if is_uncommon { highs[half * LINE + at] } else { head[usize::from(code)] };
            *value = f32::from_bits(u32::from_be_bytes([high, packed[LINE + half * LINE + at], 0, 0]));
        }
        if is_uncommon {
            (numbers, highs) = (&numbers[1..], &highs[HIGHS..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit for bit, whatever they are: all 65,536 of them, few powers, zeros.
    #[test]
    fn packed_panels_hold_all_bits() {
        let cols = 70_usize;
        let words = cols.next_multiple_of(GROUP) * PANEL;
        let every = |panel: usize| (0..words).map(move |i| ((panel * words + i) * 40_503) as u16).collect::<Vec<_>>();
        let few = |panel: usize| (0..words).map(move |i| 0x3c00 + (i * (panel + 7) % 2000) as u16).collect();
        let mixed = |panel: usize| (0..words).map(move |i| if i % 301 == panel { i as u16 } else { 0xbc80 }).collect();
        let panels: Vec<Vec<u16>> =
            (0..50).map(every).chain((50..53).map(few)).chain((53..56).map(mixed)).chain([vec![0; words]]).collect();
        let mut seen = vec![false; 1 << 16];
        let found = Found { most: usize::MAX, quarters: Mutex::default() };
        let mut packed = vec![0; panels.len() * stride(cols)];
        for (panel, words) in panels.iter().enumerate() {
            words.iter().for_each(|&word| seen[usize::from(word)] = true);
            let plain: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            pack(&plain, &mut packed[panel * stride(cols)..][..stride(cols)], panel, cols, &found);
        }
        assert!(seen.iter().all(|&seen| seen), "all numbers there are");
        let uncommon = found.sorted(panels.len(), cols).unwrap();
        for (panel, words) in panels.iter().enumerate() {
            for feature in 0..PANEL {
                let mut got = vec![0f32; cols];
                let packed = &packed[panel * stride(cols)..][..stride(cols)];
                unpack_feature(packed, first(panel, cols), uncommon.from(panel), feature, &mut got);
                for (k, got) in got.into_iter().enumerate() {
                    let want = u32::from(words[(k / 2 * PANEL + feature) * 2 + k % 2]) << 16;
                    assert_eq!(got.to_bits(), want, "panel {panel}, feature {feature}, input {k}");
                }
            }
        }
    }

    #[test]
    fn weights_with_many_powers_are_not_worth_it() {
        let (cols, mut out) = (256, vec![0; stride(256)]);
        let mut are_few = |word: fn(usize) -> u16| {
            let plain: Vec<u8> = (0..cols * PANEL).flat_map(|i| word(i).to_le_bytes()).collect();
            let found = Found::in_sample(1, cols);
            pack(&plain, &mut out, 0, cols, &found);
            found.are_few()
        };
        assert!(are_few(|_| 0));
        assert!(are_few(|i| 0x3c00 + (i * 769 % 2048) as u16));
        assert!(!are_few(|i| (i * 40_503) as u16));
    }
}
