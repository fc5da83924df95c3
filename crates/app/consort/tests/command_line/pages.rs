//! `completions` and `man`: what a shell and a manual reader get.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::{check_refused, succeed};
use testing::{bounded, needs};

#[test]
fn the_completions_are_scripts_with_every_command() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = succeed(&["completions", shell]);
        for command in ["run", "chat", "serve", "show", "ps", "--tensor-parallel", "--temperature"] {
            // fish writes long options without their dashes.
            assert!(script.contains(command.trim_start_matches('-')), "{shell}: {command}");
        }
        assert!(!script.contains("collective-timeout"), "{shell}: options of rank processes");
        assert!(shell != "zsh" || script.contains(r":HOST\:PORT:"), "{script}");
        let file = folder.path().join(shell);
        fs::write(&file, script).unwrap();
        if needs::shell(shell) {
            let checked = bounded::output(Command::new(shell).arg("-n").arg(&file));
            assert!(checked.status.success(), "{shell}: {}", String::from_utf8_lossy(&checked.stderr));
        }
    }
    check_refused(&["completions", "tcsh"], 2, "possible values");
}

#[test]
fn the_manual_has_a_page_for_every_command() {
    let page = succeed(&["man"]);
    assert!(page.contains(".TH consort 1") && page.contains("chat"), "{page}");
    let run = succeed(&["man", "run"]);
    assert!(run.contains(".TH consort-run 1") && run.contains("temperature"), "{run}");
    check_refused(&["man", "walk"], 2, "no command");
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(succeed(&["man", "--out", folder.path().to_str().unwrap()]), "");
    assert_eq!(fs::read_to_string(folder.path().join("consort.1")).unwrap(), page);
    assert_eq!(fs::read_to_string(folder.path().join("consort-run.1")).unwrap(), run);
    check_pages(folder.path(), &["consort"]);
    assert!(folder.path().join("consort-swarm-serve.1").exists() || !cfg!(feature = "swarm"));
    assert!(!folder.path().join("consort-debug.1").exists(), "a hidden command");
}

/// There is a page for a command and for each of the subcommands that its help lists.
fn check_pages(folder: &Path, command: &[&str]) {
    assert!(folder.join(format!("{}.1", command.join("-"))).exists(), "{command:?}");
    let help = succeed(&[&command[1..], &["--help"]].concat());
    let listed = help.split_once("\nCommands:\n").map(|(_, rest)| rest.split("\n\n").next().unwrap());
    for line in listed.unwrap_or_default().lines() {
        match line.split_whitespace().next().unwrap() {
            "help" => {}
            subcommand => check_pages(folder, &[command, &[subcommand]].concat()),
        }
    }
}
