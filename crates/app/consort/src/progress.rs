//! Progress bars on standard error. Hidden unless it is a terminal.

use std::borrow::Cow;
use std::io::{self, Write, stderr};
use std::sync::LazyLock;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// The bars that are shown while lines are written to standard error.
static BESIDE_LOG: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A bar that stays below the lines that [`LogWriter`] and [`suspend`] write.
pub fn beside_log(bar: ProgressBar) -> ProgressBar {
    BESIDE_LOG.add(bar)
}

/// Writes to standard error without disturbing bars.
pub fn suspend<T>(write: impl FnOnce() -> T) -> T {
    BESIDE_LOG.suspend(write)
}

/// Standard error, for a log.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        suspend(|| stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        stderr().flush()
    }
}

/// A bar for bytes, with speed and remaining time. The message names the current file.
pub fn bytes(total: u64) -> ProgressBar {
    ProgressBar::new(total).with_style(style("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} {wide_msg}"))
}

/// A bar for `total` equal steps.
pub fn steps(total: u64, message: impl Into<Cow<'static, str>>) -> ProgressBar {
    ProgressBar::new(total).with_style(style("{msg} {bar:30} {pos}/{len}")).with_message(message)
}

/// For work of unknown length.
pub fn spinner(message: impl Into<Cow<'static, str>>) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}
