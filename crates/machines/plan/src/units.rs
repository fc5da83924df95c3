//! Amounts as people read them.

use std::fmt;

/// Bytes in binary units: `512 B`, `3.4 GiB`.
pub(super) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.into_iter().find(|(_, shift)| self.0 >> shift > 0) {
            Some((unit, shift)) => write!(f, "{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// A number with three digits or more: `0.123`, `12.3`, `1234`.
pub(super) struct Digits(pub f64);

impl fmt::Display for Digits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = match self.0.abs() {
            100.0.. => 0,
            10.0.. => 1,
            1.0.. => 2,
            _ => 3,
        };
        write!(f, "{:.decimals$}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_a_unit_that_fits() {
        let check = |bytes: u64, text: &str| assert_eq!(Bytes(bytes).to_string(), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1024, "1.0 KiB");
        check(3 << 29, "1.5 GiB");
        check(u64::MAX, "16.0 EiB");
    }

    #[test]
    fn numbers_keep_three_digits() {
        let check = |value: f64, text: &str| assert_eq!(Digits(value).to_string(), text);
        check(0.1234, "0.123");
        check(1.234, "1.23");
        check(12.34, "12.3");
        check(1234.5, "1234");
    }
}
