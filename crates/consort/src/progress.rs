//! Progress of long work, on standard error, and only when that is a terminal.

use std::borrow::Cow;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of bytes, with speed and time left. Its message is the file at hand.
pub fn bytes(total: u64) -> ProgressBar {
    ProgressBar::new(total).with_style(style("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} {wide_msg}"))
}

/// A bar of `total` equal steps.
pub fn steps(total: u64, message: impl Into<Cow<'static, str>>) -> ProgressBar {
    ProgressBar::new(total).with_style(style("{msg} {bar:30} {pos}/{len}")).with_message(message)
}

/// Work of unknown length.
pub fn spinner(message: impl Into<Cow<'static, str>>) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}
