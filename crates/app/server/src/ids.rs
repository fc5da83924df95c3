//! Response ids, and the current time.

use std::time::{SystemTime, UNIX_EPOCH};

use engine::fresh_seed;

/// The prefix, such as `chatcmpl-`, and 32 random hexadecimal digits.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", fresh_seed(), fresh_seed())
}

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
