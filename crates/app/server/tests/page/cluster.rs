//! The cluster tab: the picture of a chain, live, and in the states that a cluster has.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::on_page;
use crate::site::{chain_of_three, swarm_of_five};
use crate::tab::Tab;

fn texts(tab: &Tab, selector: &str) -> Value {
    tab.eval(&format!("[...document.querySelectorAll({})].map((e) => e.textContent)", json!(selector)))
}

/// Waits for all transitions and takes a picture.
fn picture(tab: &Tab, name: &str) {
    tab.eval("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => {})))");
    tab.picture(name);
}

#[test]
fn a_chain_is_drawn_with_its_layers_hops_and_memory() {
    on_page(|_, tab| {
        tab.click("#tab-cluster");
        tab.wait_text("#chain", "cellar");
        assert_eq!(texts(tab, ".stage-name strong"), json!(["Server", "attic", "cellar"]));
        let boxes = texts(tab, ".stage-box");
        let attic = "attic10.0.0.2:7420layers 10–173.21 ms per stepavx512, 8 threads2 GB of 8 GB";
        assert_eq!(boxes[1], attic);
        assert!(boxes[0].as_str().unwrap().contains("embedding, head"), "{boxes}");
        assert_eq!(
            texts(tab, ".hop"),
            json!([
                "then to attic, 0.45 msRTT 0.30 ms",
                "then to cellar, 0.45 msRTT 0.30 ms",
                "then to Server, 0.45 msback to the server"
            ])
        );
        let shares = "[...document.querySelectorAll('.layers i')].map((e) => e.style.flexGrow).join()";
        assert_eq!(tab.eval(shares), "10,8,12");
        let label = tab.eval("document.querySelector('.layers').getAttribute('aria-label')");
        assert_eq!(label, "Server has layers 0–9; attic has layers 10–17; cellar has layers 18–29");
        assert_eq!(tab.eval("document.querySelector('.stage-box .used').style.width"), "25%");
        for (name, value) in [
            ("answer", "43.3 tokens/s"),
            ("predicted", "45 tokens/s"),
            ("batch", "160 tokens/s (16 requests)"),
            ("state", "ready"),
            ("chains", "1"),
            ("bits", "the same on all machines"),
            ("steps", "1,234"),
            ("step", "11.5 ms"),
            ("between", "1.80 ms"),
        ] {
            assert_eq!(tab.text(&format!("#cluster-{name}")), value, "{name}");
        }
        assert_eq!(
            texts(tab, ".nodes li"),
            json!([
                "old laptop10.0.0.4:7420sparea chain with it is sloweravx2, 4 threads, 4 GB, RTT 2.00 ms",
                "a machine10.0.0.5:7420failedit has another keyavx2, 4 threads, 4 GB, RTT 2.00 ms"
            ])
        );
        for scheme in ["light", "dark"] {
            tab.prefer(scheme);
            picture(tab, &format!("cluster-{scheme}"));
        }
    });
}

#[test]
fn a_chain_goes_from_left_to_right_and_on_a_phone_down() {
    on_page(|_, tab| {
        tab.click("#tab-cluster");
        tab.wait_text("#chain", "cellar");
        let place = |index: u32, side: &str| {
            let script = format!("document.querySelectorAll('.stage-box')[{index}].getBoundingClientRect().{side}");
            tab.eval(&script).as_f64().unwrap()
        };
        tab.resize(1400, 900, false);
        assert!(place(0, "right") < place(1, "left") && place(1, "right") < place(2, "left"));
        picture(tab, "cluster-wide");
        tab.resize(360, 740, true);
        assert!(place(0, "bottom") < place(1, "top") && place(1, "bottom") < place(2, "top"));
        assert_eq!(place(0, "left"), place(1, "left"));
        picture(tab, "cluster-phone");
        tab.eval("document.querySelector('#nodes').scrollIntoView()");
        picture(tab, "cluster-phone-nodes");
    });
}

#[test]
fn it_is_live_and_polling_does_not_disturb_it() {
    on_page(|site, tab| {
        tab.click("#tab-cluster");
        tab.wait_text("#chain", "cellar");
        tab.eval("window.shown = document.querySelector('.stage-name strong').firstChild");
        tab.eval("window.height = document.querySelector('#chain').offsetHeight");
        let mut cluster = chain_of_three();
        cluster["stages"][0]["compute_s"] = json!(0.012_34);
        cluster["stages"][2]["hop"]["seconds"] = json!(null);
        cluster["speed"]["tokens_per_s"] = json!(77.0);
        site.set_cluster(StatusCode::OK, cluster);
        tab.wait_text(".stage-box", "12.3 ms");
        tab.wait("/peak 77/.test(document.querySelector('#cluster .plot svg').getAttribute('aria-label'))");
        assert_eq!(texts(tab, ".hop .time"), json!(["0.45 ms", "0.45 ms", "–"]));
        assert_eq!(tab.eval("window.shown === document.querySelector('.stage-name strong').firstChild"), true);
        assert_eq!(tab.eval("window.height === document.querySelector('#chain').offsetHeight"), true, "nothing moves");

        // A machine was lost, and another has taken its layers.
        let mut cluster = chain_of_three();
        cluster["state"] = json!("rebuilding");
        cluster["reason"] = json!("the model is being rebuilt: cellar: it left");
        site.set_cluster(StatusCode::OK, cluster);
        tab.wait_text("#cluster .problem", "The model is being rebuilt: cellar: it left.");
        tab.wait("document.querySelector('#chain').classList.contains('stale')");
        picture(tab, "cluster-rebuilding");
        let mut cluster = chain_of_three();
        cluster["chains"] = json!(2);
        cluster["stages"].as_array_mut().unwrap().pop();
        cluster["stages"][1]["layers"]["end"] = json!(30);
        site.set_cluster(StatusCode::OK, cluster);
        tab.wait_text("#cluster-chains", "2");
        assert_eq!(tab.count(".chain li"), 2);
        assert_eq!(texts(tab, ".hop .way"), json!(["RTT 0.30 ms", "back to the server"]));
        assert_eq!(tab.eval("document.querySelector('#cluster .problem').hidden"), true);
        assert_eq!(tab.eval("document.querySelector('#chain').classList.contains('stale')"), false);
    });
}

#[test]
fn every_state_of_a_cluster_is_told() {
    on_page(|site, tab| {
        tab.expect_error("500");
        let mut waiting = chain_of_three();
        (waiting["stages"], waiting["layers"], waiting["bits"]) = (json!([]), json!(null), json!(null));
        (waiting["state"], waiting["waiting"]) = (json!("loading"), json!("2 GB are missing"));
        (waiting["steps"], waiting["chains"]) = (json!({ "count": 0, "seconds": null, "between_s": null }), json!(0));
        for name in ["answer_tokens_per_s", "predicted_tokens_per_s", "predicted_batch"] {
            waiting["speed"][name] = json!(null);
        }
        site.set_cluster(StatusCode::OK, waiting);
        tab.click("#tab-cluster");
        tab.wait_text("#cluster .problem", "Waiting for machines: 2 GB are missing.");
        tab.wait_text("#cluster-summary", "No layers run yet");
        assert_eq!(tab.eval("document.querySelector('#chain').hidden"), true);
        assert_eq!(tab.text("#cluster-predicted"), "–");
        picture(tab, "cluster-waiting");

        let mut alone = chain_of_three();
        (alone["kind"], alone["nodes"]) = (json!("process"), json!([]));
        let stage = &mut alone["stages"][0];
        (stage["hop"], stage["memory"]["free_bytes"], stage["compute_s"]) = (json!(null), json!(null), json!(null));
        stage["layers"]["end"] = json!(30);
        alone["stages"] = json!([alone["stages"][0]]);
        site.set_cluster(StatusCode::OK, alone.clone());
        tab.wait_text("#cluster-summary", "The server runs all 30 layers in one process.");
        assert_eq!(tab.text(".stage-box"), "Serverembedding, headlayers 0–29– per stepavx512, 8 threads2 GB of memory");
        let hidden = "['.hop', '.layers', '#nodes', '.stage-box .meter', '[aria-label=Chain]'].map((s) => document.querySelector(s).hidden)";
        assert_eq!(tab.eval(hidden), json!([true, true, true, true, true]));
        picture(tab, "cluster-process");

        (alone["kind"], alone["ranks"]) = (json!("ranks"), json!([{}, {}]));
        site.set_cluster(StatusCode::OK, alone);
        tab.wait_text("#cluster-summary", "2 processes of the server share all 30 layers.");

        site.set_cluster(StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": { "message": "something broke" } }));
        tab.wait_text("#cluster .problem", "Something broke.");
        tab.wait("document.querySelector('#chain').classList.contains('stale')");
        site.set_cluster(StatusCode::OK, chain_of_three());
        tab.wait("document.querySelector('#cluster .problem').hidden");
    });
}

#[test]
fn a_swarm_is_drawn_with_its_peers() {
    on_page(|site, tab| {
        site.set_cluster(StatusCode::OK, swarm_of_five());
        tab.click("#tab-cluster");
        tab.wait_text("#chain", "1Ncellar");
        let boxes = texts(tab, ".stage-box");
        assert_eq!(boxes[0], "Serverembedding, headno layers– per stepavx512, 8 threads– of memory");
        assert_eq!(
            boxes[1],
            "2kj6attic203.0.113.5:4101layers 0–1512.5 ms per step0.21 ms queueddirect, RTT 40.1 ms4.2 MB out, 3.9 MB in7 checks"
        );
        assert!(boxes[2].as_str().unwrap().contains("relayed, RTT 40.1 ms"), "{boxes}");
        assert!(boxes[2].as_str().unwrap().contains("via 198.51.100.4:4101"), "{boxes}");
        assert!(boxes[2].as_str().unwrap().ends_with("2 failures, 7 checks"), "{boxes}");
        let ways = json!(["RTT 39.7 ms", "through the server", "back to the server"]);
        assert_eq!(texts(tab, ".hop .way"), ways);
        let hidden = "[...document.querySelectorAll('.stage-box')[0].querySelectorAll('span:not(.tag)')].filter((e) => e.hidden).length";
        assert_eq!(
            tab.eval(hidden),
            4,
            "the server measures neither a computation nor memory, has no queue, and nobody checks it"
        );
        for (name, value) in [
            ("state", "ready"),
            ("chains", "12"),
            ("predicted", "9.5 tokens/s"),
            ("peers", "4"),
            ("reach", "directly"),
            ("sessions", "3"),
            ("replaced", "2, in 350.0 ms"),
            ("checks", "40, 1 differ"),
        ] {
            assert_eq!(tab.text(&format!("#cluster-{name}")), value, "{name}");
        }
        let rows = "['bits', 'batch'].map((name) => document.querySelector(`#cluster-${name}`).parentElement.hidden)";
        assert_eq!(tab.eval(rows), json!([true, true]));
        assert_eq!(tab.text("#nodes-title"), "Peers that are not used");
        assert_eq!(texts(tab, ".nodes .tag"), json!(["loading", "avoided", "spare"]));
        let nodes = texts(tab, ".nodes li");
        let facts = "layers 8–15, relayed, 16,384 tokens free, 1.50 ms a layer, RTT 80.0 ms";
        let loading = format!("Loading1203.0.113.7:4101 QUICloadingits layers are loading{facts}");
        assert_eq!(nodes[0], loading);
        assert!(nodes[1].as_str().unwrap().starts_with("EvilPeernot connectedavoidedit returned malformed"), "{nodes}");
        assert!(nodes[1].as_str().unwrap().ends_with("RTT 80.0 ms, 1 failure"), "{nodes}");
        assert!(
            nodes[2].as_str().unwrap().ends_with("it serves no layers of this modelrelayed, RTT 80.0 ms"),
            "{nodes}"
        );
        for scheme in ["light", "dark"] {
            tab.prefer(scheme);
            picture(tab, &format!("swarm-{scheme}"));
        }
        for (width, height) in [(320, 568), (390, 844)] {
            tab.resize(width, height, true);
            let wide =
                "document.querySelector('#cluster').scrollWidth > document.querySelector('#cluster').clientWidth";
            assert_eq!(tab.eval(wide), false, "{width}");
            picture(tab, &format!("swarm-phone-{width}"));
        }
        tab.eval("document.querySelector('[aria-label=Swarm]').scrollIntoView()");
        picture(tab, "swarm-phone-facts");
        tab.eval("document.querySelector('#nodes').scrollIntoView()");
        picture(tab, "swarm-phone-nodes");
    });
}

#[test]
fn a_swarm_without_a_chain_tells_what_it_waits_for() {
    on_page(|site, tab| {
        let mut waiting = swarm_of_five();
        (waiting["stages"], waiting["state"]) = (json!([]), json!("loading"));
        waiting["waiting"] = json!("no peer serves layers 16..30");
        waiting["steps"] = json!({ "count": 0, "seconds": null, "between_s": null });
        site.set_cluster(StatusCode::OK, waiting.clone());
        tab.click("#tab-cluster");
        tab.wait_text("#cluster .problem", "Waiting for peers: no peer serves layers 16..30.");
        assert_eq!(tab.eval("document.querySelector('#chain').hidden"), true);
        picture(tab, "swarm-waiting");
        (waiting["waiting"], waiting["state"]) = (json!(null), json!("ready"));
        site.set_cluster(StatusCode::OK, waiting);
        tab.wait_text("#cluster-summary", "the first request forms a chain of peers");
    });
}

#[test]
fn a_name_from_the_network_is_text() {
    on_page(|site, tab| {
        let evil = "<img src=x onerror=alert(1)>";
        let mut cluster = chain_of_three();
        cluster["stages"][1]["name"] = json!(evil);
        cluster["nodes"][2]["name"] = json!(evil);
        cluster["nodes"][3]["reason"] = json!(evil);
        site.set_cluster(StatusCode::OK, cluster);
        tab.click("#tab-cluster");
        tab.wait_text("#nodes", evil);
        assert_eq!(texts(tab, ".stage-name strong")[1], evil);
        assert_eq!(tab.count("#cluster img"), 0);
        tab.resize(320, 568, true);
        let wide = "document.querySelector('#cluster').scrollWidth > document.querySelector('#cluster').clientWidth";
        assert_eq!(tab.eval(wide), false);
    });
}
