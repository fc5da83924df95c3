//! A row of logits: the order of its tokens, selection of the best, and their probability mass.
//!
//! A vocabulary has up to a quarter of a million tokens, and a row is read for each token of an answer. So whole rows
//! are read in branchless loops, which the compiler vectorises; only selected tokens are handled one by one.

use crate::sampler::SampleError;

/// Logits that are summed and skipped together.
const BLOCK: usize = 256;
/// Sums that run side by side: one long chain of additions could not be vectorised.
const LANES: usize = 16;

/// The largest logit, if there is one and all are numbers.
pub(crate) fn maximum(logits: &[f32]) -> Result<f32, SampleError> {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut bad = [false; LANES];
    let (chunks, tail) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            bad[lane] |= chunk[lane].is_nan();
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    let bad = bad.contains(&true) || tail.iter().any(|logit| logit.is_nan());
    match lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max) {
        best if bad || best == f32::INFINITY => Err(SampleError::NotFinite),
        f32::NEG_INFINITY => Err(SampleError::NothingAllowed),
        best => Ok(best),
    }
}

/// The index of the first logit that equals `best`, which is one of them.
pub(crate) fn first_index(logits: &[f32], best: f32) -> usize {
    let has = |block: &[f32]| block.iter().fold(false, |has, &logit| has | (logit == best));
    let start = logits.chunks(BLOCK).position(has).map_or(0, |block| block * BLOCK);
    start + logits[start..].iter().position(|&logit| logit == best).expect("it is among them")
}

/// Orders tokens: a larger logit is better, among equals a lower id.
pub(crate) fn key(logit: f32, id: u32) -> u64 {
    let bits = (logit + 0.0).to_bits(); // -0 becomes 0
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!id)
}

/// A lower bound of the keys of all tokens with this logit or a larger one.
pub(crate) fn lowest_key(logit: f32) -> u64 {
    key(logit, u32::MAX)
}

pub(crate) fn logit_of(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}

pub(crate) fn id_of(key: u64) -> u32 {
    !(key as u32)
}

/// Fills `keys` with those of the `count` best tokens, in any order.
pub(crate) fn select_best(keys: &mut Vec<u64>, logits: &[f32], count: usize) {
    keys.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    // Candidates are collected until there are so many that the selection costs little per candidate.
    let candidates_max = count + count.max(BLOCK);
    let mut floor = f32::NEG_INFINITY;
    for (index, chunk) in logits.chunks(LANES).enumerate() {
        if !any_at_least(chunk, floor) {
            continue;
        }
        for (offset, &logit) in chunk.iter().enumerate().filter(|(_, logit)| **logit >= floor) {
            keys.push(key(logit, (index * LANES + offset) as u32));
        }
        if keys.len() >= candidates_max {
            floor = logit_of(keep_best(keys, count));
        }
    }
    keep_best(keys, count);
}

/// Keeps the `count` largest keys, which is at least one, and returns the least of them.
fn keep_best(keys: &mut Vec<u64>, count: usize) -> u64 {
    let (_, &mut least, _) = keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    keys.truncate(count);
    least
}

fn any_at_least(logits: &[f32], floor: f32) -> bool {
    logits.iter().fold(false, |any, &logit| any | (logit >= floor))
}

/// The weights `exp((logit - best) / temperature)`. The best token's is 1; their sum is a *mass*.
#[derive(Clone, Copy)]
pub(crate) struct Softmax<'a> {
    pub logits: &'a [f32],
    pub best: f32,
    pub temperature: f32,
}

impl Softmax<'_> {
    fn weight(&self, logit: f32) -> f32 {
        exp((logit - self.best) / self.temperature)
    }

    /// The mass of all tokens.
    pub fn mass(&self) -> f64 {
        self.logits.chunks(BLOCK).map(|block| self.block_mass(block, |_, _| true)).sum()
    }

    pub fn mass_of(&self, keys: &[u64]) -> f64 {
        keys.iter().map(|&key| f64::from(self.weight(logit_of(key)))).sum()
    }

    /// The last key, from the best on, that is needed to reach the mass `wanted`.
    pub fn top_p_cut(&self, keys: &mut [u64], mut wanted: f64) -> u64 {
        let mut rest = keys;
        // Halve what is left: either its better half suffices, or all of that half is kept.
        while rest.len() > 32 {
            let middle = rest.len() / 2;
            rest.select_nth_unstable_by(middle, |a, b| b.cmp(a));
            let (better, worse) = rest.split_at_mut(middle);
            let mass = self.mass_of(better);
            if mass >= wanted {
                rest = better;
            } else {
                wanted -= mass;
                rest = worse;
            }
        }
        rest.sort_unstable_by(|a, b| b.cmp(a));
        for &key in rest.iter() {
            wanted -= f64::from(self.weight(logit_of(key)));
            if wanted <= 0.0 {
                return key;
            }
        }
        *rest.last().expect("there is at least one key")
    }

    /// The token at the fraction `at` (in `0..1`) of the mass of the tokens not below `cut`, in the order of ids.
    /// `masses` is working memory.
    pub fn draw(&self, cut: u64, at: f64, masses: &mut Vec<f64>) -> u32 {
        let (floor, last) = (logit_of(cut), id_of(cut));
        let kept = |logit: f32, id: u32| (logit > floor) | ((logit == floor) & (id <= last));
        masses.clear();
        masses.extend(self.logits.chunks(BLOCK).enumerate().map(|(index, block)| {
            let first = (index * BLOCK) as u32;
            if any_at_least(block, floor) {
                self.block_mass(block, |logit, offset| kept(logit, first + offset))
            } else {
                0.0
            }
        }));
        let mut rest = at * masses.iter().sum::<f64>();
        let mut drawn = None;
        for (index, &mass) in masses.iter().enumerate().filter(|(_, mass)| **mass > 0.0) {
            // The last block with a mass is entered in any case: sums are rounded.
            let is_last = masses[index + 1..].iter().all(|&mass| mass == 0.0);
            if rest >= mass && !is_last {
                rest -= mass;
                continue;
            }
            let first = index * BLOCK;
            for (id, &logit) in (first as u32..).zip(&self.logits[first..]).take(BLOCK) {
                let weight = self.weight(logit);
                if kept(logit, id) && weight > 0.0 {
                    drawn = Some(id);
                    rest -= f64::from(weight);
                    if rest < 0.0 {
                        break;
                    }
                }
            }
            break;
        }
        drawn.expect("the best token has weight 1 and is not below any cut")
    }

    /// The mass of those tokens of a block that are `kept`, which gets their logit and their offset in the block.
    fn block_mass(&self, block: &[f32], kept: impl Fn(f32, u32) -> bool) -> f64 {
        let weight = |logit: f32, offset: u32| if kept(logit, offset) { self.weight(logit) } else { 0.0 };
        let mut lanes = [0.0f32; LANES];
        let (chunks, tail) = block.as_chunks::<LANES>();
        for (index, chunk) in chunks.iter().enumerate() {
            for lane in 0..LANES {
                lanes[lane] += weight(chunk[lane], (index * LANES + lane) as u32);
            }
        }
        let offsets = (chunks.len() * LANES) as u32..;
        let tail: f32 = offsets.zip(tail).map(|(offset, &logit)| weight(logit, offset)).sum();
        lanes.iter().map(|&sum| f64::from(sum)).sum::<f64>() + f64::from(tail)
    }
}

/// `e^x` for `x` at most 0, to within three units in the last place; 0 below -87. Without branches or calls, unlike the
/// library's.
fn exp(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4; // few bits, so that its multiples are exact
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    let series = 1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0));
    let series = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * series))));
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -87.0 { 0.0 } else { series * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_accurate_over_its_whole_range() {
        for step in 0..870_000 {
            let x = step as f32 * -1e-4;
            let (found, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found / want - 1.0).abs() < 3.0 * f64::from(f32::EPSILON), "exp({x}) is {want}, not {found}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn the_first_of_equal_logits_is_found_wherever_it_is() {
        for (size, indices) in
            [(1, &[0][..]), (300, &[255]), (300, &[256, 299]), (2000, &[511, 513, 1999]), (700, &[699])]
        {
            let mut logits = vec![-1.0; size];
            indices.iter().for_each(|&index| logits[index] = 2.0);
            assert_eq!(first_index(&logits, 2.0), indices[0], "{indices:?} of {size}");
        }
    }

    #[test]
    fn keys_order_like_logits_and_read_back() {
        let logits = [f32::NEG_INFINITY, f32::MIN, -1.5, -1e-40, 0.0, 1e-40, 2.0, f32::MAX];
        for pair in logits.windows(2) {
            assert!(key(pair[0], 0) < lowest_key(pair[1]));
        }
        for logit in logits {
            assert_eq!((logit_of(key(logit, 9)), id_of(key(logit, 9))), (logit, 9));
            assert!(key(logit, 3) > key(logit, 4));
        }
        assert_eq!(key(-0.0, 1), key(0.0, 1));
    }

    #[test]
    fn selection_agrees_with_sorting() {
        for (size, count) in [(1, 1), (15, 4), (16, 16), (1000, 1), (1000, 700), (5000, 300), (3, 9)] {
            for modulus in [5, 1009] {
                let logits: Vec<f32> = (0..size).map(|index| (index * 7919 % modulus) as f32).collect();
                let mut want: Vec<u64> = logits.iter().zip(0..).map(|(&logit, id)| key(logit, id)).collect();
                want.sort_unstable_by(|a, b| b.cmp(a));
                want.truncate(count);
                let mut found = Vec::new();
                select_best(&mut found, &logits, count);
                found.sort_unstable_by(|a, b| b.cmp(a));
                assert_eq!(found, want);
            }
        }
    }
}
