import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./style/tokens.css";
import "./style/base.css";
import "./style/shell.css";
import "./style/screens.css";
import "./style/rollout.css";
import "./ui/plainText";
import { App } from "./App";

render(<App />, document.getElementById("app")!);
