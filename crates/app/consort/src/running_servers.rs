//! The servers that this user runs on this machine: each has a small file in consort's state folder while it runs.
//!
//! A file outlives a server that is killed, and its process id may be another program's by then. So a file counts only if the
//! process still has the start time that the file names, on the same start of the same machine, and a signal is sent through a
//! descriptor of the process that was compared.

use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::bounded_file;
use crate::store::Settings;

const FILE_BYTES_MAX: u64 = 4096;
/// Files that are looked at.
const FILES_MAX: usize = 1024;
const EXTENSION: &str = "json";

/// A server that was running when it was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningServer {
    pub pid: u32,
    /// Where this machine reaches it.
    pub url: String,
    started: u64,
}

/// The file of a server. It is removed when this is dropped.
#[derive(Debug)]
pub struct Registration(PathBuf);

impl Drop for Registration {
    fn drop(&mut self) {
        // It may have been removed together with the folder.
        let _ = fs::remove_file(&self.0);
    }
}

#[derive(Deserialize, Serialize)]
struct ServerFile {
    pid: u32,
    /// In clock ticks since the start of the machine.
    started: u64,
    place: ProcessPlace,
    url: String,
}

/// Where a process id means something.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
struct ProcessPlace {
    /// The start of the machine.
    boot: String,
    /// A container has process ids of its own.
    namespace: String,
}

/// Registers this process as a server at this URL.
pub fn register(url: &str) -> Result<Registration> {
    register_in(&folder()?, url)
}

/// The servers of this user that run, in the order of their start.
pub fn list() -> Result<Vec<RunningServer>> {
    list_in(&folder()?)
}

fn folder() -> Result<PathBuf> {
    Ok(Settings::own_state()?.join("servers"))
}

fn register_in(folder: &Path, url: &str) -> Result<Registration> {
    let pid = std::process::id();
    let started = process::start_time(pid).context("read the start time of this process")?;
    let place = process::place().context("find out where this process runs")?;
    let context = || format!("write to {}", folder.display());
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder).with_context(context)?;
    let mut file = NamedTempFile::new_in(folder).with_context(context)?;
    let entry = ServerFile { pid, started, place, url: url.to_owned() };
    file.write_all(&serde_json::to_vec(&entry)?).with_context(context)?;
    let path = folder.join(format!("{pid}-{started}.{EXTENSION}"));
    file.persist(&path).map_err(|error| error.error).with_context(context)?;
    Ok(Registration(path))
}

fn list_in(folder: &Path) -> Result<Vec<RunningServer>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("read {}", folder.display()))?,
    };
    let Ok(here) = process::place() else { return Ok(Vec::new()) };
    let files = entries.flatten().map(|entry| entry.path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
    let mut servers: Vec<_> = files.take(FILES_MAX).filter_map(|path| running(&path, &here)).collect();
    servers.sort_by_key(|server| (server.started, server.pid));
    Ok(servers)
}

/// The server of a file if it runs here. Removes the file of one that has ended.
fn running(path: &Path, here: &ProcessPlace) -> Option<RunningServer> {
    let ServerFile { pid, started, place, url } =
        serde_json::from_slice(&bounded_file::read(path, FILE_BYTES_MAX).ok()?).ok()?;
    // The home folder may be that of several machines, so the file of another place is left alone.
    if place != *here {
        return None;
    }
    if process::start_time(pid).ok() != Some(started) {
        // Somebody else may have removed it.
        let _ = fs::remove_file(path);
        return None;
    }
    Some(RunningServer { pid, url, started })
}

#[cfg(target_os = "linux")]
mod process {
    use std::fs;
    use std::io;
    use std::os::fd::OwnedFd;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

    use super::{ProcessPlace, RunningServer};

    /// In clock ticks since the start of the machine.
    pub fn start_time(pid: u32) -> io::Result<u64> {
        /// The position of the field among those after the name, which may have spaces and parentheses in it.
        const FIELD: usize = 19;
        const STATE: usize = 0;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
        let time = fields.get(FIELD).filter(|_| !matches!(fields[STATE], "Z" | "X")).and_then(|time| time.parse().ok());
        time.ok_or_else(|| io::Error::other("the process has ended"))
    }

    pub fn place() -> io::Result<ProcessPlace> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(ProcessPlace { boot, namespace: fs::read_link("/proc/self/ns/pid")?.to_string_lossy().into_owned() })
    }

    /// A server that signals reach.
    pub struct ServerProcess(OwnedFd);

    impl RunningServer {
        /// `None` if the server has ended.
        pub fn process(&self) -> io::Result<Option<ServerProcess>> {
            let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
            let process = match pidfd_open(pid, PidfdFlags::empty()) {
                Err(Errno::SRCH) => return Ok(None),
                process => process?,
            };
            // The descriptor is of the process that has this id now. Only after that it is compared.
            Ok((start_time(self.pid).ok() == Some(self.started)).then_some(ServerProcess(process)))
        }
    }

    impl ServerProcess {
        /// Asks the server to finish its answers and to end; with `now` to end at once.
        pub fn ask_to_end(&self, now: bool) -> io::Result<()> {
            let signals = if now { &[Signal::TERM, Signal::INT][..] } else { &[Signal::TERM] };
            for signal in signals {
                match pidfd_send_signal(&self.0, *signal) {
                    Err(Errno::SRCH) => {}
                    sent => sent?,
                }
            }
            Ok(())
        }

        /// Waits for the end, at most so many seconds. `false`: it still runs.
        pub fn wait(&self, seconds: Option<i64>) -> io::Result<bool> {
            let time = seconds.map(|tv_sec| Timespec { tv_sec, tv_nsec: 0 });
            loop {
                match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], time.as_ref()) {
                    Err(Errno::INTR) => {}
                    ready => return Ok(ready? > 0),
                }
            }
        }
    }
}

/// Without `/proc` no server is registered.
#[cfg(not(target_os = "linux"))]
mod process {
    use std::io;

    use super::{ProcessPlace, RunningServer};

    pub fn start_time(_: u32) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn place() -> io::Result<ProcessPlace> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub enum ServerProcess {}

    impl RunningServer {
        pub fn process(&self) -> io::Result<Option<ServerProcess>> {
            Ok(None)
        }
    }

    impl ServerProcess {
        pub fn ask_to_end(&self, _: bool) -> io::Result<()> {
            match *self {}
        }

        pub fn wait(&self, _: Option<i64>) -> io::Result<bool> {
            match *self {}
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_server_is_listed_until_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("servers");
        assert_eq!(list_in(&folder).unwrap(), []);
        let registration = register_in(&folder, "http://127.0.0.1:1").unwrap();
        let servers = list_in(&folder).unwrap();
        assert_eq!((servers.len(), servers[0].pid, &*servers[0].url), (1, std::process::id(), "http://127.0.0.1:1"));
        assert!(servers[0].process().unwrap().is_some());
        drop(registration);
        assert_eq!(list_in(&folder).unwrap(), []);
    }

    fn write(folder: &Path, name: &str, change: impl FnOnce(&mut ServerFile)) -> PathBuf {
        let place = process::place().expect("this process has a place");
        let started = process::start_time(std::process::id()).expect("it has a start");
        let mut entry = ServerFile { pid: std::process::id(), started, place, url: "http://127.0.0.1:1".to_owned() };
        change(&mut entry);
        let path = folder.join(name);
        let json = serde_json::to_vec(&entry).expect("it is JSON");
        fs::write(&path, json).expect("write an entry");
        path
    }

    #[test]
    fn a_process_that_has_the_id_of_a_server_by_now_is_no_server() {
        let folder = tempfile::tempdir().unwrap();
        let other = write(folder.path(), "other.json", |entry| entry.started -= 1);
        let ended = {
            let mut child = Command::new("true").spawn().unwrap();
            child.wait().unwrap();
            write(folder.path(), "ended.json", |entry| entry.pid = child.id())
        };
        let elsewhere = write(folder.path(), "elsewhere.json", |entry| entry.place.boot = "another".to_owned());
        fs::write(folder.path().join("broken.json"), "{").unwrap();
        fs::write(folder.path().join("long.json"), vec![b' '; 5000]).unwrap();
        assert_eq!(list_in(folder.path()).unwrap(), []);
        assert!(!other.exists() && !ended.exists());
        // It may be that of a server on another machine with the same home folder.
        assert!(elsewhere.exists());
        // Between looking and signalling, too.
        let started = process::start_time(std::process::id()).unwrap();
        let server = RunningServer { pid: std::process::id(), url: String::new(), started: started - 1 };
        assert!(server.process().unwrap().is_none());
    }
}
