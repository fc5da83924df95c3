//! The cluster tab while machines come and go: colours, losses, the timeline, invitations.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::axe::assert_accessible;
use crate::on_page;
use crate::site::chain_of_three;
use crate::tab::Tab;

fn tones(tab: &Tab) -> Value {
    tab.eval(
        "Object.fromEntries([...document.querySelectorAll('.chain li')].map((li) =>
            [li.querySelector('strong').textContent, getComputedStyle(li.querySelector('.tone')).backgroundColor]))",
    )
}

/// The chain while cellar is lost.
fn without_cellar() -> Value {
    let mut cluster = chain_of_three();
    (cluster["state"], cluster["reason"]) = (json!("rebuilding"), json!("the model is being rebuilt: cellar: it left"));
    for (stage, state) in cluster["stages"].as_array_mut().unwrap().iter_mut().zip(["waiting", "waiting", "lost"]) {
        stage["state"] = json!(state);
    }
    (cluster["nodes"][1]["state"], cluster["nodes"][1]["reason"]) = (json!("lost"), json!("it left"));
    cluster["events"] = json!([
        { "at": 1_700_000_000, "kind": "formed", "machine": null, "address": null, "layers": null,
          "to": ["this machine", "attic", "cellar"], "seconds": null, "reason": null },
        { "at": 1_700_000_100, "kind": "lost", "machine": "cellar", "address": "10.0.0.3:7420",
          "layers": { "start": 18, "end": 30 }, "to": [], "seconds": null, "reason": "it left" },
    ]);
    cluster
}

#[test]
fn a_lost_machine_is_shown_as_lost_and_others_keep_their_colours() {
    on_page(|site, tab| {
        tab.click("#tab-cluster");
        tab.wait_text("#chain", "cellar");
        tab.prefer("light");
        let before = tones(tab);
        let names: std::collections::HashSet<_> = before.as_object().unwrap().values().map(Value::to_string).collect();
        assert_eq!(names.len(), 3, "{before}");

        site.set_cluster(StatusCode::OK, without_cellar());
        tab.wait_text("#chain .lost", "cellar");
        assert_eq!(tab.text(".chain .lost .tag"), "lost");
        assert_eq!(tab.text(".chain li:nth-child(2) .tag"), "waiting");
        tab.wait_text("#cluster-summary", "cellar is lost: layers 18–29 run nowhere now.");
        assert_eq!(tab.text(".chain li:nth-child(2) .hop .time"), "–", "what was measured before is not so now");
        assert_eq!(tab.text("#cluster-predicted"), "–");
        let label = tab.eval("document.querySelector('.layers').getAttribute('aria-label')");
        assert!(label.as_str().unwrap().ends_with("cellar had layers 18–29"), "{label}");
        assert_eq!(tab.count(".layers .gone"), 1);
        tab.wait_text("#nodes", "cellar10.0.0.3:7420lostit left");
        tab.wait_text("#events li:first-child", "cellar was lost, with layers 18–29: it left");
        assert_accessible(tab, "a lost machine");
        for scheme in ["light", "dark"] {
            tab.prefer(scheme);
            tab.picture(&format!("cluster-lost-{scheme}"));
        }
        tab.prefer("light");
        tab.resize(390, 844, true);
        tab.picture("cluster-lost-phone");
        tab.resize(1200, 800, false);

        // Its layers have moved: attic, now last, has the colour that it had.
        let mut moved = chain_of_three();
        moved["stages"].as_array_mut().unwrap().swap_remove(1);
        moved["stages"][1] = json!({ "index": 1, "name": "old laptop", "coordinator": false, "address": "10.0.0.4:7420",
            "layers": { "start": 10, "end": 20 }, "state": "running", "hop": { "seconds": 0.001, "round_trip_s": 0.001 } });
        let mut attic = chain_of_three()["stages"][1].clone();
        attic["layers"] = json!({ "start": 20, "end": 30 });
        moved["stages"].as_array_mut().unwrap().push(attic);
        moved["events"] = json!([{ "at": 1_700_000_102, "kind": "moved", "machine": "cellar", "address": "10.0.0.3:7420",
            "layers": { "start": 18, "end": 30 }, "to": ["old laptop", "attic"], "seconds": 2.04, "reason": null }]);
        site.set_cluster(StatusCode::OK, moved);
        tab.wait_text("#events li", "cellar lost, its layers 18–29 moved to old laptop, attic in 2.0 s");
        let after = tones(tab);
        assert_eq!((&after["Server"], &after["attic"]), (&before["Server"], &before["attic"]));
        assert!(before.as_object().unwrap().values().all(|tone| *tone != after["old laptop"]), "{after}");
        tab.reload();
        tab.wait_text("#chain", "old laptop");
        assert_eq!(tones(tab), after, "also after a reload");
    });
}

#[test]
fn an_event_from_the_network_is_text() {
    on_page(|site, tab| {
        let mut cluster = without_cellar();
        cluster["events"][1]["machine"] = json!("<img src=x onerror=alert(1)>");
        site.set_cluster(StatusCode::OK, cluster);
        tab.click("#tab-cluster");
        tab.wait_text("#events", "<img src=x");
        assert_eq!(tab.count("#cluster img"), 0);
    });
}

#[test]
fn a_machine_is_invited_with_a_code() {
    on_page(|site, tab| {
        let open = json!({ "state": "open", "code": "123456", "seconds_left": 290, "tries_left": 3, "command": "consort join",
            "command_with_address": "consort join 1", "name": "here", "port": 7421, "joined": null, "reason": null });
        site.set_invitation(open.clone());
        tab.click("#tab-cluster");
        tab.click("#invitation .plain");
        tab.wait_text("#invitation output", "123 456");
        assert_eq!(tab.text("#invitation .command code"), "consort join");
        tab.wait_text("#invitation", "Open for 5 min, 3 tries");
        let label = tab.eval("document.querySelector('.qr svg').getAttribute('aria-label')");
        assert_eq!(label, "QR code: consort join 1");
        assert_accessible(tab, "an invitation");
        tab.eval("document.querySelector('#invitation').scrollIntoView()");
        tab.picture("invitation");
        tab.resize(390, 844, true);
        tab.eval("document.querySelector('#invitation').scrollIntoView()");
        tab.picture("invitation-phone");
        let mut joined = open;
        (joined["state"], joined["code"], joined["joined"]) =
            (json!("joined"), json!(null), json!({ "name": "kitchen", "address": "10.0.0.9:1" }));
        site.set_invitation(joined);
        tab.wait_text("#invitation", "kitchen has joined.");
        assert_eq!(tab.eval("document.querySelector('#invitation .invitation').hidden"), true);
    });
}

/// The same squares as an independent encoder's (segno 1.6, mask 2), and those of larger codes were read by OpenCV.
#[test]
fn a_qr_code_has_the_squares_of_the_standard() {
    const ROWS: [&str; 21] = [
        "111111100011101111111",
        "100000100111101000001",
        "101110101011101011101",
        "101110101001101011101",
        "101110101000101011101",
        "100000101100101000001",
        "111111101010101111111",
        "000000001011100000000",
        "101111100000101111100",
        "111101001001000111001",
        "111111100100100101010",
        "010110000110110101111",
        "111010110100101000000",
        "000000001110001011001",
        "111111100100101000010",
        "100000101010010111101",
        "101110101111001101011",
        "101110101110011010100",
        "101110101011111001000",
        "100000100111110011100",
        "111111101010001010010",
    ];
    on_page(|_, tab| {
        let script = tab.eval("document.querySelector('script[type=module]').src");
        let module = format!("import({script}).then(({{ modules }}) => modules['app/qr.js'])");
        let rows = tab.eval(&format!(
            "{module}.then(({{ qrCode }}) => qrCode('consort join 1').map((row) => row.map((dark) => (dark ? 1 : 0)).join('')))"
        ));
        assert_eq!(rows, json!(ROWS));
        let sizes = tab.eval(&format!(
            "{module}.then(({{ qrCode }}) => [14, 15, 26, 62, 106, 213, 214].map((length) => qrCode('x'.repeat(length))?.length ?? null))"
        ));
        assert_eq!(sizes, json!([21, 25, 25, 33, 41, 57, null]));
    });
}
