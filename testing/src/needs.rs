//! What a test needs beyond Rust. Where it is missing, the test says so in one line, which the test harness does not capture,
//! and passes over:
//!
//! ```text
//! did not run: clients::schemathesis_finds_nothing: no pypi (pip: ...)
//! ```
//!
//! `CONSORT_TEST_REQUIRE`, a list of names with commas between them, makes it a failure.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::{env, io, thread};

/// The names that `CONSORT_TEST_REQUIRE` takes.
pub const NAMES: [&str; 15] = [
    "avx2",
    "avx512",
    "amx",
    "cuda",
    "namespaces",
    "nftables",
    "netem",
    "mount",
    "python",
    "pypi",
    "npm",
    "browser",
    "systemd",
    "shells",
    // Of `.ci/fixtures`.
    "torch",
];

const REQUIRED: &str = "CONSORT_TEST_REQUIRE";
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// A level of instructions, where `best` is that of this CPU.
pub fn level<L: Display + PartialOrd>(level: L, best: L) -> bool {
    let found = if level <= best { Ok(()) } else { Err("this CPU lacks it") };
    provided(&level.to_string(), found).is_some()
}

/// Of all levels of instructions, in their order, those that this CPU has.
pub fn levels<L: Copy + Display + PartialOrd>(all: impl IntoIterator<Item = L>, best: L) -> Vec<L> {
    all.into_iter().filter(|&one| level(one, best)).collect()
}

/// A GPU that CUDA reaches.
pub fn cuda<T>(opened: Result<T, impl Display>) -> Option<T> {
    provided("cuda", opened)
}

/// Network namespaces, which only root makes, with Debian's iproute2.
#[cfg(target_os = "linux")]
pub fn namespaces() -> bool {
    provided("namespaces", crate::network::can_make_namespaces()).is_some()
}

/// Packet filters and NATs in a network namespace, with Debian's nftables.
#[cfg(target_os = "linux")]
pub fn nftables() -> bool {
    provided("nftables", crate::network::can_filter_packets()).is_some()
}

/// Delays of packets in a network namespace.
pub fn netem(delayed: Result<(), impl Display>) -> bool {
    provided("netem", delayed).is_some()
}

/// A file system of one's own, which only root mounts.
pub fn mount(mounted: Result<(), impl Display>) -> bool {
    provided("mount", mounted).is_some()
}

pub fn python() -> bool {
    provided("python", runs("python3")).is_some()
}

/// What comes from the package index of Python: with pip and a network, or fetched before.
pub fn pypi<T>(fetched: Result<T, impl Display>) -> Option<T> {
    provided("pypi", fetched)
}

/// What comes from npm: with a network, or fetched before.
pub fn npm<T>(fetched: Result<T, impl Display>) -> Option<T> {
    provided("npm", fetched)
}

/// The path of Chromium, or of a browser made of it.
pub fn browser() -> Option<PathBuf> {
    let found = BROWSERS.iter().find_map(|name| in_path(name));
    provided("browser", found.ok_or("no Chromium in PATH; Debian has it in chromium"))
}

/// The program that checks the units of systemd.
pub fn systemd() -> bool {
    provided("systemd", runs("systemd-analyze")).is_some()
}

/// A shell other than the one of the system.
pub fn shell(name: &str) -> bool {
    provided("shells", runs(name)).is_some()
}

/// What was found; if nothing was, says so, or fails the test.
fn provided<T>(name: &str, found: Result<T, impl Display>) -> Option<T> {
    match found {
        Ok(found) => Some(found),
        Err(why) => {
            let test = test_name();
            assert!(!is_required(name), "{test} needs {name}: {why}");
            tell(&format!("did not run: {test}: no {name} ({why})"));
            None
        }
    }
}

fn is_required(name: &str) -> bool {
    let list = env::var(REQUIRED).unwrap_or_default();
    let mut required = list.split(',').filter(|name| !name.is_empty());
    if let Some(unknown) = required.clone().find(|name| !NAMES.contains(name)) {
        panic!("{REQUIRED} names {unknown:?}, which is none of {}", NAMES.join(", "));
    }
    required.any(|required| required == name)
}

/// The program and, if it runs several tests, the test.
fn test_name() -> String {
    let program = env::current_exe().unwrap();
    let program = program.file_stem().unwrap().to_string_lossy();
    // Cargo adds a hash.
    let program = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
    match thread::current().name() {
        None | Some("main") => program.to_owned(),
        Some(test) => format!("{program}::{test}"),
    }
}

/// Writes a line that the test harness does not capture, unlike `eprintln!`. Once, though a test may ask often.
fn tell(line: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if !TOLD.lock().unwrap().insert(line.to_owned()) {
        return;
    }
    // In one write, so that tests that run at once do not mix their lines.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn runs(program: &str) -> Result<(), String> {
    ran(program, Command::new(program).arg("--version").output())
}

/// The outcome of a program in one line, for the functions above.
pub fn ran(program: &str, output: io::Result<Output>) -> Result<(), String> {
    let output = output.map_err(|error| format!("`{program}` can not be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let log = String::from_utf8_lossy(&output.stderr);
    let mut lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    let first_error = lines.clone().find(|line| line.to_ascii_lowercase().contains("error"));
    Err(format!("`{program}`: {}", first_error.or(lines.next_back()).unwrap_or("it fails without a word")))
}

fn in_path(program: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(program)).find(|path| path.is_file())
}
