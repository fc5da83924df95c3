//! A row as int8 parts: the row rounded, and what that leaves, rounded again. One part keeps 8 bits of a row, two keep 16: these
//! are exact rows.

use super::super::lanes::for_each_level;
use super::super::level::Level;
use super::super::matrix::GROUP;
use super::int8::{Q8Writer, place};

/// The scale of an int8 part over that of the next one: a remainder is at most half a unit, which becomes 127 units.
pub(super) const PART_RATIO: f32 = 254.0;
/// The most int8 parts of a row.
pub(super) const PARTS_MAX: usize = 2;

const REBASE: f32 = -1.5 * (1 << 23) as f32;

/// Clears the last two mantissa bits of a scale, so that its product with [`REBASE`] is exact, and clamps it so that the
/// product is finite.
fn short_scale(scale: f32) -> f32 {
    const MOST: f32 = (1u128 << 100) as f32;
    f32::from_bits(scale.min(MOST).to_bits() & !3)
}

/// Quantises `x` into consecutive groups of a row, from group `first` on.
///
/// # Safety
/// As for [`Q8Writer::round`].
#[inline]
pub(super) unsafe fn round_row(level: Level, x: &[f32], places: &Q8Writer, row: usize, first: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => avx512::group_row(x, places, row, first),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::group_row(x, places, row, first),
            _ => scalar::group_row(x, places, row, first),
        }
    }
}

/// Rounds a block in `parts` parts: `[part][..]`. Returns the scale of the first part.
pub(super) fn round(level: Level, values: &[f32], parts: usize, out: &mut [i8], sums: &mut [i16]) -> f32 {
    assert!(values.len().is_multiple_of(16) && out.len() >= parts * values.len() && sums.len() * 16 >= out.len());
    // SAFETY: the CPU has `level` (`CpuBackend::new` checks it); the lengths fit.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => avx512::round(values, parts, out, sums),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::round(values, parts, out, sums),
            _ => scalar::round(values, parts, out, sums),
        }
    }
}

for_each_level! {
    /// What rounding to an integer leaves of numbers up to 127, in units of the next part.
    #[inline]
    unsafe fn remainder(x: V) -> V {
        // Above this number floats are integers, so adding it rounds as `store_i8` does.
        let whole = sub(add(x, splat(-REBASE)), splat(-REBASE));
        mul(sub(x, whole), splat(PART_RATIO))
    }

    /// Rounds numbers (a multiple of 16) to int8 in `parts` parts, so that the largest magnitude becomes 127, and sums every 16
    /// integers: `[part][..]`. Returns the scale that dequantises the first part; if all inputs are zero, it is zero.
    unsafe fn round(values: &[f32], parts: usize, out: &mut [i8], sums: &mut [i16]) -> f32 {
        let mut most = splat(0.0);
        for chunk in values.chunks_exact(16) {
            most = max(most, abs(load(chunk.as_ptr())));
        }
        let most = largest(most);
        let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
        for (index, chunk) in values.chunks_exact(16).enumerate() {
            let mut rest = mul(load(chunk.as_ptr()), splat(inverse));
            for part in 0..parts {
                let at = part * values.len() + index * 16;
                sums[at / 16] = store_i8(out[at..at + 16].as_mut_ptr(), rest) as i16;
                rest = remainder(rest);
            }
        }
        most / 127.0
    }

    unsafe fn group_row(x: &[f32], places: &Q8Writer, row: usize, first: usize) {
        for (index, group) in x.chunks_exact(GROUP).enumerate() {
            let mut halves = [load(group.as_ptr()), load(group.as_ptr().add(16))];
            let most = largest(max(abs(halves[0]), abs(halves[1])));
            let inverse = splat(if most > 0.0 { 127.0 / most } else { 0.0 });
            halves = [mul(halves[0], inverse), mul(halves[1], inverse)];
            let mut scale = most / 127.0;
            for part in 0..places.parts {
                let at = place(first + index, row * places.parts + part, places.tiles, places.lanes);
                let out = places.values.get().add(at * GROUP);
                let sum = store_i8(out, halves[0]) + store_i8(out.add(16), halves[1]);
                let short = short_scale(scale);
                *places.scales.get().add(at) = short;
                *places.rebase.get().add(at) = short * REBASE;
                *places.sums.get().add(at) = sum;
                *places.weighted.get().add(at) = short * sum as f32;
                halves = [remainder(halves[0]), remainder(halves[1])];
                scale = short / PART_RATIO;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use testing::needs;

    use super::super::super::matrix::SUPER;
    use super::super::super::pool::Pool;
    use super::super::{BLOCK, Q8Activations, Q8KActivations, TILE};
    use super::*;

    #[test]
    fn a_rebased_integer_times_a_scale_is_rounded_once() {
        for scale in [0.0, 1e-45, 3e-41, 1.0 / 127.0, 0.1, 7.3e12, f32::MAX] {
            let scale = short_scale(scale);
            let rebase = scale * REBASE;
            assert_eq!(f64::from(rebase), f64::from(scale) * f64::from(REBASE), "{scale}");
            for integer in [0, 1, -1, 12_345, -520_192, 520_192] {
                let float = integer as f32 - REBASE;
                assert_eq!(float.mul_add(scale, rebase), integer as f32 * scale, "{integer} times {scale}");
            }
        }
    }

    #[test]
    fn the_largest_magnitude_becomes_127_and_zeros_stay_zeros() {
        for level in needs::levels(Level::ALL, Level::detect()) {
            let mut values = [0f32; GROUP];
            let (mut out, mut sums) = ([1i8; GROUP], [1i16; 2]);
            assert_eq!(round(level, &values, 1, &mut out, &mut sums), 0.0);
            assert_eq!((out, sums), ([0; GROUP], [0; 2]));
            (values[3], values[9], values[30]) = (-2.0, 1.0, 0.5);
            let scale = round(level, &values, 1, &mut out, &mut sums);
            assert_eq!((out[3], out[9], out[30], sums), (-127, 64, 32, [-63, 32]));
            assert!((scale - 2.0 / 127.0).abs() < 1e-9);
        }
    }

    /// Half a unit of the second part is `1 / (2 * 127 * 254)` of the largest magnitude.
    #[test]
    fn two_int8_parts_keep_sixteen_bits_in_both_layouts() {
        let (pool, cols) = (Pool::new(1).unwrap(), 2 * SUPER);
        let x: Vec<f32> = (0..3 * cols).map(|i| (i as f32 * 0.7).sin() * (i % 17) as f32).collect();
        for level in needs::levels(Level::ALL, Level::detect()) {
            let mut group = Q8Activations::new(3 * PARTS_MAX, cols).unwrap();
            let mut superblock = Q8KActivations::new(3 * PARTS_MAX, cols).unwrap();
            group.fill(&pool, level, 3, 2, cols, &x);
            superblock.fill(&pool, level, 3, 2, cols, &x);
            for (index, value) in x.iter().enumerate() {
                let (row, col) = (index / cols, index % cols);
                let in_group = |part: usize| {
                    let at = group.at(col / GROUP, row * 2 + part);
                    f32::from(group.values[at * GROUP + col % GROUP]) * group.scales[at]
                };
                let in_superblock = |part: usize| {
                    let (at, lane) = (col / SUPER * superblock.tiles, row * 2 + part);
                    let value = superblock.values[at * BLOCK + col % SUPER / 64 * 64 * TILE + lane * 64 + col % 64];
                    f32::from(value) * superblock.scales[at * TILE + lane]
                };
                for [high, low] in [[0, 1].map(in_group), [0, 1].map(in_superblock)] {
                    let off = (high + low - value).abs();
                    assert!(off <= 17.0 / 64516.0 + 1e-5, "{level}, {index}: {high} and {low}, not {value}");
                }
            }
        }
    }
}
