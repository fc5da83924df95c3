//! Who is told how far a download is, and may end it.

use std::ops::ControlFlow;

use indicatif::{DecimalBytes, ProgressBar};

use crate::progress;

/// How far the download of one file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullProgress {
    pub file: String,
    /// The SHA-256 of the file, in hexadecimal, where the hub says it.
    pub digest: Option<String>,
    /// Bytes that are here, including those of an earlier attempt.
    pub done: u64,
    pub total: u64,
}

pub trait PullObserver {
    /// Before the first file: the bytes of all files, including those that are here.
    fn begin(&mut self, _bytes: u64) {}

    /// At the start of each file, after each piece of it, and at its end. `Break` ends the download; the next one
    /// goes on from there.
    fn progress(&mut self, progress: &PullProgress) -> ControlFlow<()>;
}

/// A bar on standard error with rate and time left. Without a terminal, a line for each large download.
pub struct DownloadBar {
    bar: ProgressBar,
    file: String,
    /// Bytes of the files before this one.
    before: u64,
    total: u64,
}

impl DownloadBar {
    pub fn new() -> Self {
        Self { bar: ProgressBar::hidden(), file: String::new(), before: 0, total: 0 }
    }

    /// Bytes of all files that are here.
    pub fn position(&self) -> u64 {
        self.bar.position()
    }
}

impl PullObserver for DownloadBar {
    fn begin(&mut self, bytes: u64) {
        self.bar.finish_and_clear();
        self.bar = progress::download(bytes);
        (self.before, self.total) = (0, 0);
        self.file.clear();
    }

    fn progress(&mut self, progress: &PullProgress) -> ControlFlow<()> {
        const ANNOUNCE_BYTES_MIN: u64 = 10_000_000;
        if self.file != progress.file {
            self.before += self.total;
            (self.file, self.total) = (progress.file.clone(), progress.total);
            self.bar.set_message(progress.file.clone());
            self.bar.set_position(self.before + progress.done);
            // What is here already says nothing of the rate.
            self.bar.reset_eta();
            if self.bar.is_hidden() && progress.total >= ANNOUNCE_BYTES_MIN && progress.done < progress.total {
                eprintln!("downloading {} ({})", progress.file, DecimalBytes(progress.total));
            }
        }
        self.bar.set_position(self.before + progress.done);
        ControlFlow::Continue(())
    }
}

impl Drop for DownloadBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_counts_the_bytes_of_all_files() {
        let mut bar = DownloadBar::new();
        bar.begin(30);
        for (file, done, total, position) in [("a", 0, 10, 0), ("a", 10, 10, 10), ("b", 5, 20, 15), ("b", 0, 20, 10)] {
            let progress = PullProgress { file: file.to_owned(), digest: None, done, total };
            assert!(bar.progress(&progress).is_continue());
            assert_eq!(bar.position(), position);
        }
    }
}
