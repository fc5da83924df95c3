//! What tells answers apart: an id that nobody else has, and when it was made.

use std::time::{SystemTime, UNIX_EPOCH};

use engine::fresh_seed;

/// `chatcmpl-` and 32 hexadecimal digits.
pub fn fresh(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", fresh_seed(), fresh_seed())
}

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
