// Sentences that the server writes, in Vietnamese. Numbers are `{}`, in the order of the English sentence.
//
// tests/architecture/test_web_page.py holds that every rule of the doctor, every reason of an advantage of 0 and
// every reason of a missing strip is here; any other sentence is shown as the server wrote it.

import { language } from "../settings";

const vi: Record<string, string> = {
  // rules of the doctor
  "The training reward rises while what it stands for does not.": "Reward khi huấn luyện tăng, nhưng điều mà nó đại diện thì không.",
  "One component of the reward dominates all other components.": "Một thành phần của reward lấn át mọi thành phần khác.",
  "Many rollouts break or cannot be scored.": "Nhiều rollout bị lỗi hoặc không chấm điểm được.",
  "More and more rewards cannot be computed as the run goes on.": "Càng chạy càng có nhiều reward không tính được.",
  "Most groups have samples that all score the same.": "Ở hầu hết các nhóm, mọi mẫu đều có cùng điểm.",
  "Every rollout gets the same reward.": "Mọi rollout đều nhận cùng một reward.",
  "Every answer is cut off, and every reward is the same: nothing can be learned.":
    "Mọi câu trả lời đều bị cắt và mọi reward đều như nhau: không học được gì.",
  "Tokens that the policy sampled are not trained on.": "Có token do policy sinh ra nhưng không được học.",
  "Tokens that the policy did not sample are trained on.": "Có token không do policy sinh ra nhưng lại được học.",
  "Most of what is generated is thrown away, or most prompts are never solved.":
    "Phần lớn những gì sinh ra bị bỏ đi, hoặc hầu hết prompt không bao giờ được giải.",
  "Prompts hold no special token: the chat template was not applied.":
    "Prompt không có token đặc biệt nào: chat template chưa được áp dụng.",
  "Tokenizer and model do not belong together.": "Tokenizer và mô hình không đi cùng nhau.",
  "The same prompt is in several groups of a step, so its samples are not compared.":
    "Cùng một prompt nằm ở nhiều nhóm của một bước, nên các mẫu của nó không được so với nhau.",
  "The data sampler returns the same prompts step after step.": "Bộ lấy mẫu dữ liệu trả về cùng những prompt ở mọi bước.",
  "Sampler and trainer disagree about the probability of the same tokens.":
    "Sampler và trainer cho xác suất khác nhau ở cùng những token.",
  "The sampler reports log-probabilities of another distribution than it samples from.":
    "Sampler báo log-xác suất của một phân phối khác với phân phối mà nó lấy mẫu.",
  "The sampler has been another distribution from the first step on, at a temperature.":
    "Ngay từ bước đầu sampler đã là một phân phối khác, khi có đặt temperature.",
  "The sampler says that it has the latest weights, and computes with older ones.":
    "Sampler báo rằng nó có trọng số mới nhất, nhưng lại tính với trọng số cũ hơn.",
  "Rollouts were sampled with older weights than the run allows.":
    "Rollout được lấy mẫu với trọng số cũ hơn mức mà lượt chạy cho phép.",
  "Most answers end at the token budget.": "Hầu hết câu trả lời dừng vì hết số token cho phép.",
  "Answers grow and the reward does not.": "Câu trả lời dài ra nhưng reward không tăng.",
  "Tools are offered, and the policy never calls them.": "Có công cụ, nhưng policy không bao giờ gọi.",
  "Nearly every tool call fails, or cannot be read.": "Gần như mọi lời gọi công cụ đều thất bại hoặc không đọc được.",
  "A file of the run is damaged or missing.": "Một tệp của lượt chạy bị hỏng hoặc bị thiếu.",
  "Nothing held out is measured.": "Không có phép đo nào trên dữ liệu giữ riêng.",
  "The run handles fewer and fewer tokens a second.": "Số token xử lý mỗi giây ngày càng giảm.",
  "Ranks or replicas that could work at the same time stand idle for most of it.":
    "Các rank hoặc replica lẽ ra làm việc cùng lúc thì phần lớn thời gian lại rảnh.",
  "A metric is NaN or infinite.": "Một metric là NaN hoặc vô cùng.",
  "The learning rate is {} for several steps, or no number.": "Learning rate bằng {} trong nhiều bước, hoặc không phải là số.",
  "The weights do not move although there is something to learn.": "Trọng số không thay đổi dù vẫn có điều để học.",
  "Optimizer steps are left out because their gradient is not finite.":
    "Có bước của optimizer bị bỏ qua vì gradient không hữu hạn.",
  "Most of the update is clipped away.": "Phần lớn cập nhật bị clip bỏ.",
  "The policy leaves the reference, or its own last version, behind.":
    "Policy đã đi quá xa reference, hoặc quá xa phiên bản trước của chính nó.",
  "The policy stopped exploring before the task is solved.": "Policy ngừng khám phá khi bài toán chưa được giải.",
  "The policy becomes noise.": "Policy đang trở thành nhiễu.",
  "The loss of the critic grows by an order of magnitude.": "Hàm mất mát của critic tăng gấp khoảng mười lần.",
  "The critic predicts returns worse than their mean would.": "Critic dự đoán return kém hơn cả giá trị trung bình của chúng.",
  // where a value comes from
  "command line": "dòng lệnh",
  // verdicts
  "The run has not finished a step.": "Lượt chạy chưa hoàn tất bước nào.",
  // why an advantage is 0
  "Nothing is trained on a validation.": "Validation không dùng để huấn luyện.",
  "All {} rollouts got the reward {}, so none is better than another and every advantage is {}.":
    "Cả {} rollout đều nhận reward {}, nên không rollout nào tốt hơn và mọi advantage đều bằng {}.",
  "{} of {} rollouts failed, and the step left the group out.": "{} trong {} rollout bị lỗi, và bước này đã bỏ cả nhóm.",
  "The step left the group out (algorithm.filter_groups, or the fault policy).":
    "Bước này đã bỏ cả nhóm (do algorithm.filter_groups hoặc cách xử lý lỗi đã cấu hình).",
  "The rollout failed, and the step left it out.": "Rollout bị lỗi, và bước này đã bỏ nó.",
  "The step left the rollout out (algorithm.filter_groups, or the fault policy).":
    "Bước này đã bỏ rollout (do algorithm.filter_groups hoặc cách xử lý lỗi đã cấu hình).",
  "Its reward equals the baseline of its group, so it is neither better nor worse.":
    "Reward của nó bằng đúng mức cơ sở của nhóm, nên nó không tốt hơn cũng không kém hơn.",
  // why a strip is missing
  "the file has no log-probabilities of the trainer: nothing is trained on a validation":
    "tệp không có log-xác suất của trainer: validation không dùng để huấn luyện",
  "the file has no log-probabilities of the trainer: it was written by an older version; a replay of the step computes them":
    "tệp không có log-xác suất của trainer: tệp do một phiên bản cũ hơn ghi; chạy lại bước này sẽ tính được",
  "the file has no log-probabilities of the trainer: the step did not train on the rollout":
    "tệp không có log-xác suất của trainer: bước này không học từ rollout",
  "the file has no log-probabilities of the trainer: the algorithm takes those of the sampler; a replay of the step computes them":
    "tệp không có log-xác suất của trainer: thuật toán dùng log-xác suất của sampler; chạy lại bước này sẽ tính được",
  "entropies are recorded as a mean of the step only (actor/entropy); a replay of the step computes them":
    "entropy chỉ được ghi dưới dạng trung bình của bước (actor/entropy); chạy lại bước này sẽ tính được",
  "the step did not train on the rollout": "bước này không học từ rollout",
};

const NUMBER = /-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?/g;

/** What follows is the message of a reader, which is in English. */
const UNJUDGED = "The run cannot be judged: ";

/** A sentence of the server in the language of the page, where it is known. */
export function told(sentence: string): string {
  if (language.value !== "vi") return sentence;
  if (sentence.startsWith(UNJUDGED)) return `Không đánh giá được lượt chạy: ${sentence.slice(UNJUDGED.length)}`;
  const values: string[] = [];
  const found = vi[sentence.replace(NUMBER, (value) => (values.push(value), "{}"))];
  return found === undefined ? sentence : found.replace(/\{\}/g, () => values.shift() ?? "");
}
