//! Vectors of 16 f32 lanes with the same functions on each instruction set, so that a kernel is written once.
//!
//! [`for_each_level!`] expands a kernel into one module per level (`scalar`, `avx2`, `avx512`), where `V` is the vector and
//! the functions below work on it. All levels compute the same bits: each op is a single IEEE operation per lane.

/// Expands functions into modules `scalar`, `avx2` and `avx512`, each compiled for its instructions with the vector ops
/// of that level in scope. The functions are `unsafe`: the caller guarantees that the CPU has the level.
macro_rules! for_each_level {
    ($($body:tt)*) => {
        mod scalar {
            #[allow(unused_imports)]
            use super::*;
            #[allow(unused_imports)]
            use $crate::cpu::lanes::scalar::*;
            $crate::cpu::lanes::with_features!({} $($body)*);
        }
        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            #[allow(unused_imports)]
            use super::*;
            #[allow(unused_imports)]
            use $crate::cpu::lanes::avx2::*;
            $crate::cpu::lanes::with_features!({ #[target_feature(enable = "avx2,fma,f16c")] } $($body)*);
        }
        #[cfg(target_arch = "x86_64")]
        mod avx512 {
            #[allow(unused_imports)]
            use super::*;
            #[allow(unused_imports)]
            use $crate::cpu::lanes::avx512::*;
            $crate::cpu::lanes::with_features!({ #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")] } $($body)*);
        }
    };
}

/// Puts the attributes in braces before every `fn`.
macro_rules! with_features {
    ($attrs:tt $($(#[$meta:meta])* unsafe fn $name:ident $(<$(const $c:ident : $ct:ty),*>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $(
            $crate::cpu::lanes::with_attrs!($attrs $(#[$meta])* pub(super) unsafe fn $name $(<$(const $c: $ct),*>)? ($($arg: $ty),*) $(-> $ret)? $body);
        )*
    };
}

macro_rules! with_attrs {
    ({ $($attr:tt)* } $($item:tt)*) => {
        $($attr)*
        #[allow(unsafe_op_in_unsafe_fn)] // one `unsafe` contract for the whole kernel: pointers in range, level present
        $($item)*
    };
}

pub(crate) use {for_each_level, with_attrs, with_features};

/// Constants of `exp`: `2^n * p(r)` with `n = round(x / ln 2)`.
pub(crate) mod exp_constants {
    pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
    /// `ln 2` in two parts, so that `x - n ln 2` is exact enough.
    pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
    pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Taylor coefficients of `e^r` from the sixth power down: accurate enough for f32 on |r| <= ln 2 / 2.
    pub(crate) const POLY: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    /// Below `LOWEST` the result is zero, above `HIGHEST` infinite.
    pub(crate) const LOWEST: f32 = -87.336_54;
    pub(crate) const HIGHEST: f32 = 88.722_84;
}

pub(crate) mod scalar {
    use half::f16;

    use super::exp_constants::{HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, POLY};

    pub(crate) type V = [f32; 16];
    /// Vectors that fit in the registers.
    pub(crate) const REGISTERS: usize = 8;

    #[inline(always)]
    fn map(a: V, f: impl Fn(f32) -> f32) -> V {
        a.map(f)
    }

    #[inline(always)]
    fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
        std::array::from_fn(|i| f(a[i], b[i]))
    }

    #[inline(always)]
    pub(crate) fn splat(value: f32) -> V {
        [value; 16]
    }
    /// # Safety
    /// `from` points to 16 f32.
    #[inline(always)]
    pub(crate) unsafe fn load(from: *const f32) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { from.cast::<V>().read_unaligned() }
    }
    /// # Safety
    /// `to` points to 16 f32.
    #[inline(always)]
    pub(crate) unsafe fn store(to: *mut f32, a: V) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<V>().write_unaligned(a) }
    }
    /// # Safety
    /// `from` points to 16 f16.
    #[inline(always)]
    pub(crate) unsafe fn load_f16(from: *const u16) -> V {
        // SAFETY: guaranteed by the caller.
        std::array::from_fn(|i| f16::from_bits(unsafe { from.add(i).read_unaligned() }).to_f32())
    }
    /// # Safety
    /// `to` points to 16 f16.
    #[inline(always)]
    pub(crate) unsafe fn store_f16(to: *mut u16, a: V) {
        for (i, value) in a.into_iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { to.add(i).write_unaligned(f16::from_f32(value).to_bits()) }
        }
    }
    /// The even and the odd bf16 of 16 pairs.
    /// # Safety
    /// `from` points to 32 bf16.
    #[inline(always)]
    pub(crate) unsafe fn load_bf16_pairs(from: *const u16) -> (V, V) {
        // SAFETY: guaranteed by the caller.
        let at = |i: usize| f32::from_bits(u32::from(unsafe { from.add(i).read_unaligned() }) << 16);
        (std::array::from_fn(|i| at(2 * i)), std::array::from_fn(|i| at(2 * i + 1)))
    }
    #[inline(always)]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    pub(crate) fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    pub(crate) fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    pub(crate) fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    pub(crate) fn div(a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    pub(crate) fn max(a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    /// `a` in the lanes below `count`, `b` in the others.
    #[inline(always)]
    pub(crate) fn first_lanes(count: usize, a: V, b: V) -> V {
        std::array::from_fn(|i| if i < count { a[i] } else { b[i] })
    }
    /// The sum of the lanes, by pairwise halving.
    #[inline(always)]
    pub(crate) fn sum(a: V) -> f32 {
        let mut a = a;
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                a[i] += a[i + width];
            }
        }
        a[0]
    }
    #[inline(always)]
    pub(crate) fn largest(a: V) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    pub(crate) fn abs(a: V) -> V {
        map(a, f32::abs)
    }
    /// Rounds to the nearest integers (half to even) within the range of i8, stores them, and returns their sum.
    /// # Safety
    /// `to` points to 16 i8.
    #[inline(always)]
    pub(crate) unsafe fn store_i8(to: *mut i8, a: V) -> i32 {
        let rounded = a.map(|value| value.round_ties_even() as i32);
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[i8; 16]>().write_unaligned(rounded.map(|value| value as i8)) };
        rounded.into_iter().sum()
    }
    #[inline(always)]
    pub(crate) fn exp(x: V) -> V {
        map(x, |x| {
            let inside = x.clamp(LOWEST, HIGHEST);
            let n = (inside * LOG2_E).round_ties_even();
            let r = (-n).mul_add(LN2_LOW, (-n).mul_add(LN2_HIGH, inside));
            let p = POLY[1..].iter().fold(POLY[0], |p, &c| p.mul_add(r, c));
            // Two factors, because 2^n alone may be outside the range of a power of two in f32.
            let (half, rest) = (n as i32 >> 1, n as i32 - (n as i32 >> 1));
            let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
            if x < LOWEST { 0.0 } else { p * power(half) * power(rest) }
        })
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use super::exp_constants::{HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, POLY};

    #[derive(Clone, Copy)]
    pub(crate) struct V(__m256, __m256);
    /// Vectors that fit in the registers.
    pub(crate) const REGISTERS: usize = 8;

    macro_rules! ops {
        ($($(#[$meta:meta])* $([$unsafe:ident])? fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {
            $(
                $(#[$meta])*
                #[inline]
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(unsafe_op_in_unsafe_fn)]
                pub(crate) $($unsafe)? fn $name($($arg: $ty),*) $(-> $ret)? $body
            )*
        };
    }

    ops! {
        fn splat(value: f32) -> V {
            V(_mm256_set1_ps(value), _mm256_set1_ps(value))
        }
        /// # Safety
        /// `from` points to 16 f32.
        [unsafe] fn load(from: *const f32) -> V {
            V(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)))
        }
        /// # Safety
        /// `to` points to 16 f32.
        [unsafe] fn store(to: *mut f32, a: V) {
            _mm256_storeu_ps(to, a.0);
            _mm256_storeu_ps(to.add(8), a.1);
        }
        /// # Safety
        /// `from` points to 16 f16.
        [unsafe] fn load_f16(from: *const u16) -> V {
            V(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())))
        }
        /// # Safety
        /// `to` points to 16 f16.
        [unsafe] fn store_f16(to: *mut u16, a: V) {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a.0));
            _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a.1));
        }
        /// # Safety
        /// `from` points to 32 bf16.
        [unsafe] fn load_bf16_pairs(from: *const u16) -> (V, V) {
            let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(16).cast()));
            let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            (
                V(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b))),
                V(_mm256_castsi256_ps(_mm256_and_si256(a, odd)), _mm256_castsi256_ps(_mm256_and_si256(b, odd))),
            )
        }
        fn fma(a: V, b: V, c: V) -> V {
            V(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
        }
        fn add(a: V, b: V) -> V {
            V(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1))
        }
        fn sub(a: V, b: V) -> V {
            V(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1))
        }
        fn mul(a: V, b: V) -> V {
            V(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1))
        }
        fn div(a: V, b: V) -> V {
            V(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1))
        }
        fn max(a: V, b: V) -> V {
            V(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1))
        }
        fn first_lanes(count: usize, a: V, b: V) -> V {
            let count = _mm256_set1_epi32(count as i32);
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
            V(
                _mm256_blendv_ps(b.0, a.0, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low))),
                _mm256_blendv_ps(b.1, a.1, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high))),
            )
        }
        fn sum(a: V) -> f32 {
            let a = _mm256_add_ps(a.0, a.1);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
        fn largest(a: V) -> f32 {
            let a = _mm256_max_ps(a.0, a.1);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
        fn abs(a: V) -> V {
            let sign = _mm256_set1_ps(-0.0);
            V(_mm256_andnot_ps(sign, a.0), _mm256_andnot_ps(sign, a.1))
        }
        /// # Safety
        /// `to` points to 16 i8.
        [unsafe] fn store_i8(to: *mut i8, a: V) -> i32 {
            let (low, high) = (_mm256_cvtps_epi32(a.0), _mm256_cvtps_epi32(a.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), bytes);
            let sum = _mm256_add_epi32(low, high);
            let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
            _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32::<0b10_11_00_01>(sum)))
        }
        fn exp_half(x: __m256) -> __m256 {
            let inside = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(LOWEST)), _mm256_set1_ps(HIGHEST));
            let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(inside, _mm256_set1_ps(LOG2_E)));
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_HIGH), inside);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_LOW), r);
            let mut p = _mm256_set1_ps(POLY[0]);
            for c in &POLY[1..] {
                p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
            }
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            let bias = _mm256_set1_epi32(127);
            let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, bias)));
            let value = _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(rest));
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(LOWEST)), value)
        }
        fn exp(x: V) -> V {
            V(exp_half(x.0), exp_half(x.1))
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512 {
    use std::arch::x86_64::*;

    use super::exp_constants::{HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, POLY};

    pub(crate) type V = __m512;
    /// Vectors that fit in the registers.
    pub(crate) const REGISTERS: usize = 32;

    macro_rules! ops {
        ($($(#[$meta:meta])* $([$unsafe:ident])? fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {
            $(
                $(#[$meta])*
                #[inline]
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
                #[allow(unsafe_op_in_unsafe_fn)]
                pub(crate) $($unsafe)? fn $name($($arg: $ty),*) $(-> $ret)? $body
            )*
        };
    }

    ops! {
        fn splat(value: f32) -> V {
            _mm512_set1_ps(value)
        }
        /// # Safety
        /// `from` points to 16 f32.
        [unsafe] fn load(from: *const f32) -> V {
            _mm512_loadu_ps(from)
        }
        /// # Safety
        /// `to` points to 16 f32.
        [unsafe] fn store(to: *mut f32, a: V) {
            _mm512_storeu_ps(to, a);
        }
        /// # Safety
        /// `from` points to 16 f16.
        [unsafe] fn load_f16(from: *const u16) -> V {
            _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
        }
        /// # Safety
        /// `to` points to 16 f16.
        [unsafe] fn store_f16(to: *mut u16, a: V) {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
        }
        /// # Safety
        /// `from` points to 32 bf16.
        [unsafe] fn load_bf16_pairs(from: *const u16) -> (V, V) {
            let pairs = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd))
        }
        fn fma(a: V, b: V, c: V) -> V {
            _mm512_fmadd_ps(a, b, c)
        }
        fn add(a: V, b: V) -> V {
            _mm512_add_ps(a, b)
        }
        fn sub(a: V, b: V) -> V {
            _mm512_sub_ps(a, b)
        }
        fn mul(a: V, b: V) -> V {
            _mm512_mul_ps(a, b)
        }
        fn div(a: V, b: V) -> V {
            _mm512_div_ps(a, b)
        }
        fn max(a: V, b: V) -> V {
            _mm512_max_ps(a, b)
        }
        fn first_lanes(count: usize, a: V, b: V) -> V {
            let mask = if count >= 16 { u16::MAX } else { (1u16 << count) - 1 };
            _mm512_mask_mov_ps(b, mask, a)
        }
        fn sum(a: V) -> f32 {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
        fn largest(a: V) -> f32 {
            _mm512_reduce_max_ps(a)
        }
        fn abs(a: V) -> V {
            _mm512_abs_ps(a)
        }
        /// # Safety
        /// `to` points to 16 i8.
        [unsafe] fn store_i8(to: *mut i8, a: V) -> i32 {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a));
            _mm_storeu_si128(to.cast(), bytes);
            // The sum of absolute differences from -128 is the sum of the bytes plus 16 times 128.
            let halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
            _mm_cvtsi128_si32(halves) + _mm_extract_epi16::<4>(halves) - 16 * 128
        }
        fn exp(x: V) -> V {
            let inside = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(LOWEST)), _mm512_set1_ps(HIGHEST));
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(inside, _mm512_set1_ps(LOG2_E)));
            let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_HIGH), inside);
            let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_LOW), r);
            let mut p = _mm512_set1_ps(POLY[0]);
            for c in &POLY[1..] {
                p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
            }
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(LOWEST));
            _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), below, _mm512_setzero_ps())
        }
    }
}

#[cfg(test)]
mod tests {
    for_each_level! {
        unsafe fn exp_all(x: &mut [f32; 16]) {
            store(x.as_mut_ptr(), exp(load(x.as_ptr())));
        }
        unsafe fn sums(x: &[f32; 16]) -> f32 {
            sum(load(x.as_ptr()))
        }
        unsafe fn halves(x: &[f32; 16], count: usize) -> [f32; 16] {
            let mut bits = [0u16; 16];
            store_f16(bits.as_mut_ptr(), load(x.as_ptr()));
            let mut out = [0f32; 16];
            store(out.as_mut_ptr(), first_lanes(count, load_f16(bits.as_ptr()), splat(-1.0)));
            out
        }
    }

    fn inputs() -> Vec<[f32; 16]> {
        (0..200).map(|i| std::array::from_fn(|j| (i * 16 + j) as f32 * 0.06 - 96.0)).collect()
    }

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        for x in inputs() {
            let mut got = x;
            // SAFETY: plain Rust.
            unsafe { scalar::exp_all(&mut got) };
            for (x, got) in x.into_iter().zip(got) {
                let want = f64::from(x).exp();
                if x > -87.0 && x < 88.0 {
                    assert!((f64::from(got) - want).abs() <= want * 2.4e-7, "exp({x}) = {got}, not {want}");
                }
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_level_computes_the_same_bits() {
        use crate::cpu::Level;
        for x in inputs() {
            let (mut want, mut got) = (x, x);
            // SAFETY: plain Rust; the vector versions only where the CPU has them.
            unsafe {
                scalar::exp_all(&mut want);
                let bits = |x: [f32; 16]| x.map(f32::to_bits);
                if Level::detect() >= Level::Avx2 {
                    avx2::exp_all(&mut got);
                    assert_eq!(bits(got), bits(want));
                    assert_eq!(avx2::sums(&x).to_bits(), scalar::sums(&x).to_bits());
                    assert_eq!(bits(avx2::halves(&x, 5)), bits(scalar::halves(&x, 5)));
                }
                if Level::detect() >= Level::Avx512 {
                    got = x;
                    avx512::exp_all(&mut got);
                    assert_eq!(bits(got), bits(want));
                    assert_eq!(avx512::sums(&x).to_bits(), scalar::sums(&x).to_bits());
                    assert_eq!(bits(avx512::halves(&x, 5)), bits(scalar::halves(&x, 5)));
                }
            }
        }
    }
}
