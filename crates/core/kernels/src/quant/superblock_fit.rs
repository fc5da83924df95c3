//! Searches scales for the groups of a superblock that minimise the quantisation error.
//!
//! For each group the search tries a range of candidate scales. A candidate rounds the weights to integers; weighted least
//! squares then give the best real scale (and offset) for these integers, and the remaining error. The best candidate's
//! scales are rounded to the format, and the integers are computed again for the rounded scales. Large weights count for
//! more, because they affect the layer's output more.
//!
//! A superblock is stored transposed, `[element][group]`, so that the groups are the lanes of a vector: each lane does the
//! same arithmetic, and conditions are selections without branches.

use half::f16;

/// A superblock of weights `(d * scale) * q - dmin * min`.
pub(super) struct Affine<const LEN: usize, const GROUPS: usize> {
    pub quants: [[u8; GROUPS]; LEN], // [element][group]
    pub scales: [u8; GROUPS],
    pub mins: [u8; GROUPS],
    pub d: f16,
    pub dmin: f16,
}

/// A superblock of weights `(d * scale) * (q - zero)`, with 16 groups of 16.
pub(super) struct Symmetric {
    pub quants: [u8; 256],
    pub scales: [i8; 16],
    pub d: f16,
}

/// A candidate divides a group's range into as many steps as the format has, plus an offset from `*_FIRST` on in increments
/// of `CANDIDATE_DISTANCE`; the first is the coarsest.
const CANDIDATES: usize = 11;
const CANDIDATE_DISTANCE: f32 = 0.2;
const AFFINE_FIRST: f32 = -1.2;
const SYMMETRIC_FIRST: f32 = -1.0;

/// Ranges below this are treated as empty, so that quotients stay finite. The smallest f16 is `6e-8`.
const RANGE_MIN: f32 = 1e-30;
/// A determinant below this fraction of its first term is rounding noise: all integers of the group are equal.
const DETERMINANT_MIN: f32 = 1e-5;

/// Finds `TOP + 1` levels for each group of `LEN`, with scales and mins of at most `MULTIPLE` steps. The values and their
/// fourth powers must be finite.
#[inline(always)]
pub(super) fn affine<const TOP: u8, const MULTIPLE: u8, const LEN: usize, const GROUPS: usize>(
    values: &[f32; 256],
) -> Affine<LEN, GROUPS> {
    let top = f32::from(TOP);
    let x = transposed::<LEN, GROUPS>(values);
    let (scales, mins) = fit_affine(&x, top);
    let (d, scales) = multiples(scales, f32::from(MULTIPLE));
    let (dmin, mins) = multiples(mins, f32::from(MULTIPLE));

    let (mut inverse, mut offset) = ([0.0; GROUPS], [0.0; GROUPS]);
    for group in 0..GROUPS {
        let scale = d.to_f32() * f32::from(scales[group]);
        inverse[group] = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        offset[group] = dmin.to_f32() * f32::from(mins[group]);
    }
    let mut quants = [[0; GROUPS]; LEN];
    for (quants, x) in quants.iter_mut().zip(&x) {
        for group in 0..GROUPS {
            quants[group] = level(nearest((x[group] + offset[group]) * inverse[group], 0.0, top));
        }
    }
    Affine { quants, scales, mins, d, dmin }
}

/// Finds `2 * ZERO` levels around zero for each group of 16, with scales of `-MULTIPLE..MULTIPLE` steps. The values must
/// satisfy the condition of [`affine`].
#[inline(always)]
pub(super) fn symmetric<const ZERO: u8, const MULTIPLE: u8>(values: &[f32; 256]) -> Symmetric {
    let zero = f32::from(ZERO);
    let x = transposed::<16, 16>(values);
    let (d, scales) = signed_multiples(fit_symmetric(&x, zero), f32::from(MULTIPLE));

    let mut inverse = [0.0; 16];
    for group in 0..16 {
        let scale = d.to_f32() * f32::from(scales[group]);
        inverse[group] = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    }
    let mut quants = [0; 256];
    for (group, quants) in quants.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        for (quant, x) in quants.iter_mut().zip(&x) {
            *quant = level(nearest(x[group] * inverse[group], -zero, zero - 1.0) + zero);
        }
    }
    Symmetric { quants, scales, d }
}

/// The scale and the min (how far below zero level 0 lies, never negative) of each group.
#[inline(always)]
fn fit_affine<const LEN: usize, const GROUPS: usize>(
    x: &[[f32; GROUPS]; LEN],
    top: f32,
) -> ([f32; GROUPS], [f32; GROUPS]) {
    let (mut low, mut high) = ([0.0; GROUPS], x[0]);
    for x in x {
        for group in 0..GROUPS {
            low[group] = if x[group] < low[group] { x[group] } else { low[group] };
            high[group] = if x[group] > high[group] { x[group] } else { high[group] };
        }
    }
    let weight = importance(x);
    let (mut sum_w, mut sum_x) = ([0.0; GROUPS], [0.0; GROUPS]);
    for (x, w) in x.iter().zip(&weight) {
        for group in 0..GROUPS {
            sum_w[group] += w[group];
            sum_x[group] += w[group] * x[group];
        }
    }

    // If no candidate is better, the levels span the lowest value to the highest.
    let mut scale = [0.0; GROUPS];
    for group in 0..GROUPS {
        scale[group] = (high[group] - low[group]) / top;
    }
    let (mut offset, mut best) = (low, [f32::NEG_INFINITY; GROUPS]);
    for candidate in 0..CANDIDATES {
        let steps = top + AFFINE_FIRST + CANDIDATE_DISTANCE * candidate as f32;
        let mut inverse = [0.0; GROUPS];
        for group in 0..GROUPS {
            // Relative to the best offset so far, so that later candidates refine it.
            let range = high[group] - offset[group];
            inverse[group] = if range > RANGE_MIN { steps / range } else { 0.0 };
        }
        let (mut sum_q, mut sum_qq, mut sum_qx) = ([0.0; GROUPS], [0.0; GROUPS], [0.0; GROUPS]);
        for (x, w) in x.iter().zip(&weight) {
            for group in 0..GROUPS {
                let q = nearest((x[group] - offset[group]) * inverse[group], 0.0, top);
                let wq = w[group] * q;
                sum_q[group] += wq;
                sum_qq[group] += wq * q;
                sum_qx[group] += wq * x[group];
            }
        }
        for group in 0..GROUPS {
            // x = s q + m with the least weighted error, or with m = 0 if m would be positive. In both cases the error is a
            // constant minus `s sum_qx + m sum_x`.
            let (w, q, qq) = (sum_w[group], sum_q[group], sum_qq[group]);
            let (x, qx) = (sum_x[group], sum_qx[group]);
            let determinant = w * qq - q * q;
            let (free_s, free_m) = ((w * qx - x * q) / determinant, (qq * x - q * qx) / determinant);
            let (s, m) = if free_m > 0.0 { (qx / qq, 0.0) } else { (free_s, free_m) };
            let gain = s * qx + m * x;
            let better = determinant > DETERMINANT_MIN * w * qq && gain > best[group];
            scale[group] = if better { s } else { scale[group] };
            offset[group] = if better { m } else { offset[group] };
            best[group] = if better { gain } else { best[group] };
        }
    }
    (scale, offset.map(|offset| -offset))
}

/// The scale of each group. It is negative if the value of largest magnitude is positive, because there is one more level
/// below zero than above.
#[inline(always)]
fn fit_symmetric(x: &[[f32; 16]; 16], zero: f32) -> [f32; 16] {
    let mut extreme = [0.0f32; 16];
    for x in x {
        for group in 0..16 {
            extreme[group] = if x[group].abs() > extreme[group].abs() { x[group] } else { extreme[group] };
        }
    }
    let weight = importance(x);
    let mut scale = [0.0; 16];
    for group in 0..16 {
        scale[group] = extreme[group] / -zero;
    }
    let mut best = [0.0; 16];
    for candidate in 0..CANDIDATES {
        let steps = zero + SYMMETRIC_FIRST + CANDIDATE_DISTANCE * candidate as f32;
        let mut inverse = [0.0; 16];
        for group in 0..16 {
            inverse[group] = if extreme[group].abs() > RANGE_MIN { -steps / extreme[group] } else { 0.0 };
        }
        let (mut sum_qq, mut sum_qx) = ([0.0; 16], [0.0; 16]);
        for (x, w) in x.iter().zip(&weight) {
            for group in 0..16 {
                let q = nearest(x[group] * inverse[group], -zero, zero - 1.0);
                let wq = w[group] * q;
                sum_qq[group] += wq * q;
                sum_qx[group] += wq * x[group];
            }
        }
        for group in 0..16 {
            // x = s q with the least weighted error, which is a constant minus `s sum_qx`.
            let s = sum_qx[group] / sum_qq[group];
            let gain = s * sum_qx[group];
            let better = gain > best[group];
            scale[group] = if better { s } else { scale[group] };
            best[group] = if better { gain } else { best[group] };
        }
    }
    scale
}

/// The weight of each value's squared error: its magnitude plus the group's root mean square, so that small values count.
#[inline(always)]
fn importance<const LEN: usize, const GROUPS: usize>(x: &[[f32; GROUPS]; LEN]) -> [[f32; GROUPS]; LEN] {
    let mut mean = [0.0; GROUPS];
    for x in x {
        for group in 0..GROUPS {
            mean[group] += x[group] * x[group];
        }
    }
    for mean in &mut mean {
        *mean = (*mean / LEN as f32).sqrt();
    }
    let mut weight = *x;
    for weight in &mut weight {
        for group in 0..GROUPS {
            weight[group] = mean[group] + weight[group].abs();
        }
    }
    weight
}

/// Multiples `0..=top` of a step that is an f16, nearest to `values`, which are not negative.
#[inline(always)]
fn multiples<const GROUPS: usize>(values: [f32; GROUPS], top: f32) -> (f16, [u8; GROUPS]) {
    let largest = values.into_iter().fold(0.0, f32::max);
    let step = step(largest, top);
    let inverse = if step > f16::ZERO { 1.0 / step.to_f32() } else { 0.0 };
    (step, values.map(|value| nearest(value * inverse, 0.0, top) as u8))
}

/// Multiples `-end..end` of a step that is an f16 of either sign, nearest to `values`.
#[inline(always)]
fn signed_multiples(values: [f32; 16], end: f32) -> (f16, [i8; 16]) {
    let extreme = values.into_iter().fold(0.0f32, |extreme, v| if v.abs() > extreme.abs() { v } else { extreme });
    let step = step(extreme, -end);
    let inverse = if step != f16::ZERO { 1.0 / step.to_f32() } else { 0.0 };
    (step, values.map(|value| nearest(value * inverse, -end, end - 1.0) as i8))
}

/// The f16 nearest to `value / multiple`, or the next larger one if rounding down would make `value` unreachable: below
/// 6e-5, as with small weights, f16 is coarse.
#[inline(always)]
fn step(value: f32, multiple: f32) -> f16 {
    let limit = f16::MAX.to_f32();
    let exact = (value / multiple).clamp(-limit, limit);
    let nearest = f16::from_f32(exact);
    let reach = nearest.to_f32().abs() * (multiple.abs() + 0.5);
    if reach < exact.abs() * multiple.abs() { f16::from_bits(nearest.to_bits() + 1) } else { nearest }
}

/// Adding this rounds to an integer, in one instruction on every CPU, because f32 has no fractional bits at this size.
const INTEGERS: f32 = 12_582_912.0; // 1.5 * 2^23

/// The nearest integer in `low..=high`, halves to even. `value` must not be NaN.
#[inline(always)]
fn nearest(value: f32, low: f32, high: f32) -> f32 {
    let value = if value > low { value } else { low };
    let value = if value < high { value } else { high };
    (value + INTEGERS) - INTEGERS
}

/// An integer of `0..256` as a byte, taken from its last bits, because a saturating float cast does not vectorise.
#[inline(always)]
fn level(integer: f32) -> u8 {
    (integer + INTEGERS).to_bits() as u8
}

#[inline(always)]
fn transposed<const LEN: usize, const GROUPS: usize>(values: &[f32; 256]) -> [[f32; GROUPS]; LEN] {
    let mut x = [[0.0; GROUPS]; LEN];
    for (group, values) in values.chunks_exact(LEN).enumerate() {
        for (x, value) in x.iter_mut().zip(values) {
            x[group] = *value;
        }
    }
    x
}
